"""A Flower federation on this machine: a SuperLink and SuperNodes as processes that end with the `with` block.

Everything lies in one folder, Flower's own files too; only 127.0.0.1 is used; telemetry, update check and run-time
installation are off. Whatever we start we stop, and what those processes started ends with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from credentials import write_certificates, write_keys

from fedfuse.flower.version import QUIET

HOST, LINK = "127.0.0.1", "loopback"
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return int(taken.getsockname()[1])


@dataclass
class Deployment:
    """A SuperLink with TLS and node authentication, and the SuperNodes that were started.

    Attributes:
        folder: where everything lies.
        patience: seconds to wait for a process to be there.
        port: the SuperLink's.
        processes: what runs, by name.
    """

    folder: Path
    patience: float = 120.0
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def keys(self) -> Path:
        """Certificates and key pairs."""
        return self.folder / "keys"

    @property
    def environment(self) -> dict[str, str]:
        """What our processes see: a home of their own, and a Flower that is quiet."""
        path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
        alone = {"FLWR_HOME": str(self.folder / "flwr"), "PATH": path, "OMP_NUM_THREADS": "1"}
        return {**os.environ, **QUIET, **alone}

    def __enter__(self) -> Deployment:
        write_certificates(self.keys)
        home = self.folder / "flwr"
        home.mkdir(parents=True)
        link = {"address": f"{HOST}:{self.port}", "root-certificates": str(self.keys / "ca.crt")}
        lines = [f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]', *(f'{k} = "{v}"' for k, v in link.items())]
        (home / "config.toml").write_text("\n".join(lines) + "\n")
        try:
            self.start_link()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start_link(self) -> None:
        """Start the SuperLink and wait until it listens."""
        certificates = (
            ("--ssl-ca-certfile", "ca.crt"),
            ("--ssl-certfile", "server.crt"),
            ("--ssl-keyfile", "server.key"),
        )
        tls = [word for option, file in certificates for word in (option, str(self.keys / file))]
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port), *tls, "--enable-supernode-auth"]
        self.start("superlink", [*command, "--disable-runtime-dependency-installation"])
        ends = time.monotonic() + self.patience
        while not listens(self.port):
            if self.processes["superlink"].poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the SuperLink did not start:\n{self.log('superlink')}")
            time.sleep(0.2)

    def register(self, site: str) -> None:
        """Make a site's key pair and tell the SuperLink its public half and its name."""
        write_keys(self.keys, site)
        self.flwr("supernode", "register", str(self.keys / f"{site}.pub"), LINK, "--name", site)

    def start_node(self, site: str, data: Path, *more: str, secure: bool = True) -> None:
        """Start a site's SuperNode; it is told where its rows are, and the server is not."""
        where = ["flower-supernode", "--superlink", f"{HOST}:{self.port}", "--host", HOST, "--port", str(free_port())]
        tls = ["--root-certificates", str(self.keys / "ca.crt")] if secure else ["--insecure"]
        key = ["--auth-supernode-private-key", str(self.keys / f"{site}.key")]
        self.start(site, [*where, *tls, *key, "--node-config", f'data="{data}"', *more])

    def start(self, name: str, command: list[str]) -> None:
        """Start a process whose words go to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def flwr(self, *words: str) -> str:
        """Run Flower's command line and return what it says."""
        done = subprocess.run(
            [str(BIN / "flwr"), *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, app: Path, **config: str | float | bool) -> str:
        """Start a run of an app; returns its id."""
        said = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        words = ["run", str(app), LINK, "--format", "json", *(["--run-config", said] if said else [])]
        return str(json.loads(self.flwr(*words))["run-id"])

    def log(self, name: str) -> str:
        """What a process has said."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End one process, and see to it that nothing it started stays."""
        process = self.processes.pop(name)
        children = descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(how)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def stop(self) -> None:
        """End everything, the sites first."""
        for name in reversed(list(self.processes)):
            self.end(name)
        for pid in ours(self.folder / "flwr"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder / "flwr", ignore_errors=True)


def listens(port: int) -> bool:
    with socket.socket() as knock:
        knock.settimeout(1)
        return knock.connect_ex((HOST, port)) == 0


def descendants(pid: int) -> list[int]:
    """Every process below this one, where the system tells."""
    below = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return [*below, *(pid for child in below for pid in descendants(child))]


def ours(home: Path) -> list[int]:
    """Every process that was started with this Flower home, where the system tells."""
    mark, found = f"FLWR_HOME={home}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]
