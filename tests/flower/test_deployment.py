"""A real SuperLink and three real SuperNodes on loopback, with certificates and keys, and what may go wrong there."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from credentials import write_keys
from deployment import HOST, Deployment, descendants, ours
from fake_grid import site_files
from safetensors.torch import load_file, save_file

from fedfuse.core.spec import Spec
from fedfuse.data import load
from fedfuse.engines.local import InProcess, Population
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.results import Ledger
from fedfuse.flower.app import write_app
from fedfuse.server.loop import run
from fedfuse.wire.files import save_model

pytestmark = pytest.mark.flower
SITES = {"north": 60, "east": 45, "south": 80}
PATIENCE = 900.0  # a busy machine may take its time

SPOILING = '''
"""Two sites that send what nobody asked for: another thing in every round."""

import numpy as np
from flwr.app import Array, MetricRecord
from pathlib import Path

from fedfuse.flower.records import BRIEF, PARAMS, REPLY
from fedfuse.flower.site import site_app

app = site_app(Path(__file__).with_name("experiment.toml"))


def spoil(message, context, call_next):
    reply = call_next(message, context)
    said, arrays = message.content[BRIEF], reply.content.array_records[PARAMS]
    if (said["client"], said["round"]) == ("north", 0):
        arrays["fc1.bias"] = Array(np.full(8, np.nan, np.float32))
    elif (said["client"], said["round"]) == ("east", 0):
        arrays["fc1.bias"] = Array(np.zeros((1, 8), np.float32))
    elif (said["client"], said["round"]) == ("north", 1):
        arrays["backdoor"] = Array(np.zeros(8, np.float32))
    elif (said["client"], said["round"]) == ("east", 1):
        numbers = reply.content.metric_records[f"{REPLY}.numbers"]
        reply.content[f"{REPLY}.numbers"] = MetricRecord({**numbers, "num_examples": 1e9})
    return reply


clerk = app._registered_funcs["train.default"]
app._registered_funcs["train.default"] = lambda message, context: spoil(message, context, clerk)
'''


def experiment(rounds: int, adapters: dict[str, Any] | None = None, **server: Any) -> Experiment:
    return Experiment(
        name="deployed",
        rounds=rounds,
        seeds=(2,),
        data={"clients": 3, "test_limit": 60},
        model={"name": "mlp", "hidden": [8]} | ({} if adapters is None else {"adapters": adapters}),
        local={"batch_size": 16, "optimizer": {"lr": 0.1}},
        methods=[{"name": "fedavg" if adapters is None else "flora"}],
        server=server,
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return site_files(tmp_path_factory.mktemp("rows"), SITES)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, rows: dict[str, Path]) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("federation"), patience=PATIENCE) as deployment:
        for site, file in rows.items():
            deployment.register(site)
            deployment.start_node(site, file)
        yield deployment


class Run:
    """A run of an app on the federation, and its run directory."""

    def __init__(self, federation: Deployment, folder: Path, what: Experiment, client: str = "") -> None:
        self.federation, self.app, self.out, self.what = federation, folder / "app", folder / "run", what
        write_app(what, self.app)
        if client:
            (self.app / "federation" / "client_app.py").write_text(client)

    def start(self, **config: str | float | bool) -> Run:
        self.federation.submit(self.app, out=str(self.out), wait=PATIENCE, **{"deadline": PATIENCE, **config})
        return self

    @property
    def lines(self) -> list[dict[str, Any]]:
        return Ledger(self.out / "ledger.jsonl").lines()

    @property
    def model(self) -> Path:
        return self.out / "models" / f"{self.what.methods[0].name}-2.safetensors"

    def until(self, true: Callable[[], object]) -> Run:
        ends = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < ends, self.federation.log("superlink")[-6000:]
            time.sleep(0.3)
        return self

    def finished(self) -> Run:
        return self.until(lambda: (self.out / "report.html").exists())


def weights(path: Path) -> bytes:
    """The bytes of all tensors of a file, behind its header, which tells of the run it came from."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def here(what: Experiment, rows: dict[str, Path], folder: Path) -> bytes:
    """The same experiment on the same rows in this process: the bytes of the final model's weights."""
    population = Population.of({site: load(str(file)).train for site, file in rows.items()})
    prepared = prepare(what)
    setting = prepared.setting(2, population.sizes())
    (recipe,) = prepared.recipes.values()
    engine = InProcess(population, seed=2)
    *_, last = run(recipe, engine, setting.bench, setting.judge, setting.start, setting.plan)
    save_model(last.state.model, folder / "here.safetensors", {})
    return weights(folder / "here.safetensors")


@pytest.fixture(scope="module")
def healthy(federation: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in which nothing goes wrong; it also shows how long a round takes on this machine."""
    return Run(federation, tmp_path_factory.mktemp("healthy"), experiment(2)).start().finished()


def test_a_deployment_gives_the_bytes_of_one_process(healthy: Run, rows: dict[str, Path], tmp_path: Path) -> None:
    done = healthy
    assert [list(line["clients"]) for line in done.lines] == [["east", "north", "south"]] * 2
    assert {site: told["num_examples"] for site, told in done.lines[0]["clients"].items()} == SITES
    assert weights(done.model) == here(done.what, rows, tmp_path)


def test_adapters_of_a_base_that_every_node_has(federation: Deployment, rows: dict[str, Path], tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    save_file(Spec("mlp", {"inputs": 64, "hidden": [8], "classes": 10}).build().state_dict(), base)
    what = experiment(2, adapters={"rank": 2, "base": str(base)})
    done = Run(federation, tmp_path, what).start().finished()
    assert weights(done.model) == here(what, rows, tmp_path)
    assert all("lora" in name or "merged" in name for name in load_file(done.model))


def test_a_second_run_on_the_same_superlink_and_what_the_door_refuses(federation: Deployment, tmp_path: Path) -> None:
    done = Run(federation, tmp_path, experiment(2, quorum=0.3), SPOILING).start().finished()
    refused = [{r["client"]: (r["field"], r["got"]) for r in line["refused"]} for line in done.lines]
    assert refused[0] == {"north": ("fc1.bias", "not finite"), "east": ("fc1.bias", "1×8 float32")}
    assert refused[1] == {"north": ("backdoor", "sent unasked"), "east": ("num_examples", "1000000000.0")}
    assert [list(line["clients"]) for line in done.lines] == [["south"], ["south"]]


def test_a_node_killed_in_mid_round_is_missed_at_the_deadline_and_may_come_back(
    healthy: Run, federation: Deployment, rows: dict[str, Path], tmp_path: Path
) -> None:
    deadline = 15 + 3 * max(line["train_seconds"] for line in healthy.lines)
    killed = Run(federation, tmp_path / "killed", experiment(3)).start(deadline=deadline)
    killed.until(lambda: len(killed.lines) == 1).until(lambda: at_work(federation, "south"))
    federation.end("south", signal.SIGKILL)
    killed.finished()
    missed = next(line for line in killed.lines if line["dropped"])
    assert [drop["client"] for drop in missed["dropped"]] == ["south"]
    assert list(missed["clients"]) == ["east", "north"]
    assert missed["train_seconds"] < deadline + 30

    def supervised() -> bool:
        """Starts the site until it stays: for a while the SuperLink takes it for a second one with the same key."""
        if not (process := federation.processes.get("south")) or process.poll() is not None:
            federation.start_node("south", rows["south"])
        return (back.out / "report.html").exists()

    back = Run(federation, tmp_path / "back", experiment(1)).start()
    back.until(supervised)
    assert list(back.lines[0]["clients"]) == ["east", "north", "south"]


def test_a_server_killed_between_rounds_goes_on_and_ends_with_the_same_bytes(
    federation: Deployment, rows: dict[str, Path], tmp_path: Path
) -> None:
    begun = Run(federation, tmp_path, experiment(3)).start()
    begun.until(lambda: begun.lines)
    servers = [pid for pid in ours(federation.folder / "flwr") if "flwr-serverapp" in " ".join(words(pid))]
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    done = len(begun.lines)
    begun.start(resume=True).finished()
    assert done < 3
    assert [line["round"] for line in begun.lines] == [1, 2, 3]
    assert weights(begun.model) == here(begun.what, rows, tmp_path)


def at_work(federation: Deployment, site: str) -> bool:
    """Whether a site's SuperNode has heard the brief and started a process for it."""
    return any("flwr-clientapp" in " ".join(words(pid)) for pid in descendants(federation.processes[site].pid))


def words(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_node_without_a_registered_key_is_refused(federation: Deployment, rows: dict[str, Path]) -> None:
    write_keys(federation.keys, "stranger")
    federation.start_node("stranger", rows["north"], "--max-retries", "1")
    code = federation.processes["stranger"].wait(timeout=PATIENCE)
    federation.end("stranger")
    assert code != 0
    assert "Failed to activate SuperNode" in federation.log("stranger")
    assert "Attempted to register SuperNode with public key" in federation.log("superlink")


def test_plaintext_to_the_tls_port_is_refused(federation: Deployment) -> None:
    with socket.create_connection((HOST, federation.port), timeout=60) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            answer = plain.recv(4096)
        except ConnectionError:
            answer = b""
    assert answer == b""
    trusting = ssl.create_default_context(cafile=str(federation.keys / "ca.crt"))
    with (
        socket.create_connection((HOST, federation.port), timeout=60) as raw,
        trusting.wrap_socket(raw, server_hostname=HOST) as secure,  # the same port, to whoever holds the authority
    ):
        assert secure.version() == "TLSv1.3"


def test_everything_ends_with_the_federation(tmp_path: Path) -> None:
    with Deployment(tmp_path / "short", patience=PATIENCE) as deployment:
        link = deployment.processes["superlink"].pid
        assert deployment.environment["FLWR_TELEMETRY_ENABLED"] == "0"
        below = descendants(link)
    assert not ours(tmp_path / "short" / "flwr")
    assert not any(psutil.pid_exists(pid) for pid in [link, *below])
    assert not (tmp_path / "short" / "flwr").exists()
