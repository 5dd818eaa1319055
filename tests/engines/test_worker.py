from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import odd_parts
import pytest
import torch

from builders import as_bytes
from fedfuse.core.messages import Brief
from fedfuse.core.seams import Work
from fedfuse.engines import worker
from fedfuse.engines.local import InProcess, Population
from fedfuse.engines.worker import RowFiles
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import decode, encode
from fedfuse.wire.messages import encode_brief


def test_tensors_travel_by_value() -> None:
    mine = torch.rand(1000)
    data = bytes(worker.ByValue.dumps({"w": mine}))
    assert len(data) > mine.nbytes
    assert not mine.is_shared()  # torch's own way would have moved it
    assert torch.equal(ForkingPickler.loads(data)["w"], mine)


def test_a_turn_is_a_line_of_json_and_two_messages(population: Population, brief: Brief, work: Work) -> None:
    row_files = RowFiles()
    parent, child = Pipe()
    with parent, child:
        inputs = (work, brief.spec, encode_brief(brief), 6, row_files.add(population.rows))
        index = population.index["site-2"].numpy()
        parent.send_bytes(worker.ByValue.dumps(worker.PackedRound(*inputs)))
        parent.send_bytes(worker.ByValue.dumps(("site-2", index, encode({}, {}), None)))
        held = worker._turn(child, None)
        facts = json.loads(parent.recv_bytes())
        assert (facts["dropped"], facts["remembered"]) == ("", False)
        (expected,) = InProcess(population, seed=6).exchange(brief, work, ("site-2",))
        assert parent.recv_bytes() == as_bytes(expected.payload)
        assert len(decode(parent.recv_bytes()).tensors) == 0
        assert held is not None
        parent.send_bytes(b"")  # the same inputs again
        parent.send_bytes(worker.ByValue.dumps(("site-2", index, encode({}, {}), as_bytes(expected.payload))))
        assert worker._turn(child, held) is held
        assert json.loads(parent.recv_bytes())["remembered"] is True
    row_files.clear()


SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = {folders!r}
import odd_parts
from builders import initial, rows
from fedfuse.core.messages import Brief
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.engines.local import Population
from fedfuse.engines.pool import Pool

if __name__ == "__main__":
    people = Population.of(dict.fromkeys("abc", rows(8, 1, 8, 8)))
    spec = Spec("mlp", {{"inputs": 64, "hidden": [4], "classes": 3}})
    brief = Brief(0, spec, initial(spec), classes=3)
    with Pool(workers=2) as pool:
        engine = pool.engine(people)
        list(engine.exchange(brief, Work(objective=odd_parts.Slow(600.0, Path({folder!r}))), engine.clients))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_however_the_parent_ends_nothing_stays(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script.write_text(SCRIPT.format(folders=folders, folder=str(tmp_path)))
    command = [sys.executable, "-W", "error", str(script)]
    own = {"start_new_session": True, "preexec_fn": _hear_interrupts}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **own) as parent:
        began = [tmp_path / "a", tmp_path / "b"]
        wait_for(lambda: all(path.exists() and path.read_text() for path in began) or parent.poll() is not None)
        pids = [int(path.read_text()) for path in began]
        if how == signal.SIGINT:
            os.killpg(parent.pid, how)  # as a terminal does on Ctrl-C: to all of them
        else:
            parent.send_signal(how)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        words = parent.communicate(timeout=20)[1]
    assert parent.returncode == -how
    assert words.count("Traceback") == (how == signal.SIGINT)  # the parent's own


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job is born deaf to Ctrl-C


def wait_for(condition: object, seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.05)


def test_an_error_of_the_users_is_told_by_name(population: Population, brief: Brief, work: Work) -> None:
    row_files = RowFiles()
    parent, child = Pipe()
    with parent, child:
        stubborn = replace(work, objective=odd_parts.Spoiled("site-2", ConfigError))
        inputs = (stubborn, brief.spec, encode_brief(brief), 6, row_files.add(population.rows))
        parent.send_bytes(worker.ByValue.dumps(worker.PackedRound(*inputs)))
        turn = ("site-2", population.index["site-2"].numpy(), encode({}, {}), None)
        parent.send_bytes(worker.ByValue.dumps(turn))
        assert worker._turn(child, None) is None
        assert json.loads(parent.recv_bytes()) == {"error": "ConfigError", "text": "site-2 will not"}
    row_files.clear()
