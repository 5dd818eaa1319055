"""The real command line, killed and interrupted: what it leaves behind is enough to end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedfuse.experiment.config import Experiment

pytestmark = pytest.mark.slow

FEDFUSE = str(Path(sys.executable).with_name("fedfuse"))
KILLS = 10  # for each of two ways to run


@pytest.fixture
def file(tmp_path: Path, tiny: Callable[..., Experiment]) -> Path:
    """Methods whose clients remember, whose clients go on alone, and whose server remembers."""
    path = tmp_path / "long.toml"
    data = {"clients": 4, "train_limit": 400, "test_limit": 200, "validation_fraction": 0.1}
    methods = ("scaffold", "moon", "local", "fedadam")
    path.write_text(tiny(*methods, rounds=8, data=data, clients_per_round=3, local={"epochs": 8}).to_toml())
    return path


def command(file: Path, out: Path, *more: str) -> list[str]:
    return [FEDFUSE, "run", str(file), "--out", str(out), "--no-page", "--workers", "2", *more]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}


def hear_ctrl_c() -> None:
    """Whoever starts the tests in the background makes all their children deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def outcome(out: Path) -> dict[str, Any]:
    results = json.loads((out / "results.json").read_text())
    for row in results["rows"]:
        del row["train_seconds"], row["server_seconds"]
    return {"results": results, "models": {p.name: p.read_bytes() for p in (out / "models").iterdir()}}


def newest(out: Path) -> int:
    """When anything in a folder last changed; files may vanish while we look."""
    times = [0]
    for path in out.rglob("*"):
        try:
            times.append(path.stat().st_mtime_ns)
        except OSError:
            continue
    return max(times)


def family(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """A zombie is dead: it waits only for whoever adopted it to notice."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_all_gone(processes: list[psutil.Process]) -> None:
    limit = time.monotonic() + 60
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not alive, f"orphans: {alive}"


def run_and_kill(arguments: list[str], out: Path, tmp_path: Path, draw: random.Random) -> bool:
    """Start a run, let it write something, and kill it a random moment later; says whether it was still running."""
    before, limit = newest(out), time.monotonic() + 120
    process = subprocess.Popen(arguments, env=environment(tmp_path), stdout=subprocess.DEVNULL)
    while newest(out) == before and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    try:
        process.wait(draw.uniform(0, 1.5))
    except subprocess.TimeoutExpired:
        workers = family(process)
        process.kill()
        process.wait()
        assert_all_gone(workers)
        return True
    assert process.returncode == 0
    return False


@pytest.mark.parametrize("memo", ["--memo", "--no-memo"])
def test_killed_at_random_moments_it_ends_as_if_undisturbed(file: Path, tmp_path: Path, memo: str) -> None:
    whole, out, draw = tmp_path / "whole", tmp_path / "killed-0", random.Random(memo)
    subprocess.run(command(file, whole, "--no-memo"), env=environment(tmp_path), check=True, capture_output=True)
    kills = ends = 0
    while kills < KILLS:
        if run_and_kill(command(file, out, memo, "--resume"), out, tmp_path, draw):
            kills += 1
        else:
            assert outcome(out) == outcome(whole)
            ends += 1
            out = tmp_path / f"killed-{ends}"
    subprocess.run(command(file, out, memo, "--resume"), env=environment(tmp_path), check=True, capture_output=True)
    assert outcome(out) == outcome(whole)
    assert not [path for path in out.rglob(".*") if path.is_file()]


def test_an_interrupted_run_says_how_to_go_on_and_leaves_nobody_behind(file: Path, tmp_path: Path) -> None:
    out, sets = tmp_path / "stopped", ["--set", "rounds=9", "--set", 'name="a b"']
    process = subprocess.Popen(
        command(file, out, "--no-memo", *sets),
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )
    while not (out / "ledger.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    workers = family(process)
    assert len(workers) >= 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers hear it too
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert_all_gone(workers)
    assert "Traceback" not in said
    *progress, line = said.splitlines()
    assert all(text.startswith("a b: ") for text in progress)
    assert line.startswith("error: stopped; continue with: fedfuse run ")
    advice = shlex.split(line.partition("continue with: ")[2])
    resumed = [FEDFUSE, *advice[1:], "--no-page", "--workers", "0", "--no-memo"]
    subprocess.run(resumed, env=environment(tmp_path), check=True, capture_output=True)
    whole = tmp_path / "whole"
    subprocess.run(command(file, whole, "--no-memo", *sets), env=environment(tmp_path), check=True, capture_output=True)
    assert outcome(out) == outcome(whole)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 2.0])
def test_an_interrupted_start_is_as_quiet(file: Path, tmp_path: Path, seconds: float) -> None:
    """Ctrl-C while workers are still waking up."""
    process = subprocess.Popen(
        command(file, tmp_path / "out", "--no-memo", "--set", "rounds=500"),  # longer than a fast machine takes
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )
    while not (tmp_path / "out" / "config.toml").exists():
        assert process.poll() is None
        time.sleep(0.005)
    time.sleep(seconds)
    workers = family(process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert_all_gone(workers)
    assert "stopped; continue with" in said
    assert "Traceback" not in said


def test_a_terminated_run_leaves_no_temporary_folders(file: Path, tmp_path: Path) -> None:
    """`kill` left a folder `pymp-…` of Python's multiprocessing in the folder for temporary files."""
    out, temporary = tmp_path / "out", Path(tempfile.mkdtemp(prefix="kill-"))  # short: sockets have short names
    process = subprocess.Popen(
        command(file, out, "--no-memo"),
        env={**environment(tmp_path), "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (out / "ledger.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    workers = family(process)
    assert list(temporary.iterdir())
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert_all_gone(workers)
    assert "stopped; continue with" in said
    assert not list(temporary.iterdir())
    temporary.rmdir()


def test_a_folder_for_temporary_files_too_deep_for_sockets_is_named(file: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    asked = {**environment(tmp_path), "TMPDIR": str(deep)}
    done = subprocess.run(command(file, tmp_path / "out"), env=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "set TMPDIR to a shorter one, or use workers=0" in " ".join(done.stderr.split())
