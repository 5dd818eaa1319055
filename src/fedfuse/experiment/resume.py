"""Checkpoints: the server's state and what clients remember, so that a killed run ends as an undisturbed one."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfuse.core.messages import Start
from fedfuse.core.model import networks
from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.errors import ConfigError, FuseError
from fedfuse.wire.codec import read, write
from fedfuse.wire.files import load_model, save_model

KEEP = 2  # the last one, and the one before in case the last was damaged


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """One folder per method and seed: `round-0003/` holds the model, the memory and a checksum of both."""

    folder: Path

    def save(self, state: ServerState, memories: Mapping[str, Params]) -> None:
        """Write a round's state; the seal is written last, so a folder with a seal is whole."""
        place = self.folder / f"round-{state.round:06d}"
        save_model(state.model, place / "model.safetensors")
        tensors = {f"server/{n}": t for n, t in state.memory.items()}
        for client, memory in memories.items():
            tensors |= {f"client/{client}/{n}": t for n, t in memory.items()}
        for client, start in state.starts.items():
            tensors |= {f"start/{client}/{n}": t for n, t in start.params.items()}
        specs = {client: start.spec.to_json() for client, start in state.starts.items()}
        write(place / "memory.safetensors", tensors, {"kind": "checkpoint", "round": state.round, "specs": specs})
        seal = {name: _checksum(place / name) for name in ("model.safetensors", "memory.safetensors")}
        write(place / "seal.safetensors", {}, seal)
        for old in self._rounds()[:-KEEP]:
            _remove(self._place(old))

    def restore(self, at_most: int, like: ServerState) -> tuple[ServerState, dict[str, dict[str, Tensor]]] | None:
        """The newest whole state not beyond a round; a damaged one falls back to the one before."""
        for round_ in reversed([r for r in self._rounds() if r <= at_most]):
            with contextlib.suppress(FuseError, OSError, KeyError, ValueError):
                return self._load(round_, like)
        return None

    def _load(self, round_: int, like: ServerState) -> tuple[ServerState, dict[str, dict[str, Tensor]]]:
        place = self._place(round_)
        for name, checksum in read(place / "seal.safetensors").header.items():
            if _checksum(place / name) != checksum:
                raise ConfigError(f"the checkpoint {place / name} is damaged")
        model_specs = _specs(like)
        model, _ = load_model(place / "model.safetensors", {s.factory for s in model_specs})
        packet = read(place / "memory.safetensors")
        found: dict[str, dict[str, dict[str, Tensor]]] = {"client": {}, "start": {}}
        memory: dict[str, Tensor] = {}
        for name, tensor in packet.tensors.items():
            kind, rest = name.split("/", 1)
            if kind == "server":
                memory[rest] = tensor
            else:
                client, tensor_name = rest.split("/", 1)
                found[kind].setdefault(client, {})[tensor_name] = tensor
        trusted = {s.factory for s in model_specs}
        starts = {
            client: Start(Spec.from_json(packet.header["specs"][client], trusted), params)
            for client, params in found["start"].items()
        }
        return replace(like, round=round_, model=model, memory=memory, starts=starts), found["client"]

    def _place(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}"

    def _rounds(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        sealed = [p for p in self.folder.iterdir() if (p / "seal.safetensors").exists()]
        return sorted(int(p.name.removeprefix("round-")) for p in sealed)


def same_run(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Why a run directory cannot be continued with this configuration, or None if it can.

    More rounds, seeds and methods may be added; everything else must be as it was.
    """
    free = ("rounds", "seeds", "methods", "name")
    for key in sorted(old.keys() | new.keys()):
        if key not in free and old.get(key) != new.get(key):
            return f"{key} was {_short(old.get(key))} and is now {_short(new.get(key))}"
    for key in ("seeds", "methods"):
        gone = [v for v in old.get(key, []) if v not in new.get(key, [])]
        if gone:
            return f"{key} no longer has {_short(gone[0])}"
    if old.get("rounds", 1) > new.get("rounds", 1):
        return f"rounds was {old.get('rounds', 1)} and is now {new.get('rounds', 1)}"
    return None


def _specs(state: ServerState) -> set[Spec]:
    return {m.spec for m in networks(state.model)} | {s.spec for s in state.starts.values()}


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _remove(place: Path) -> None:
    with contextlib.suppress(OSError):
        (place / "seal.safetensors").unlink()  # first: what has no seal does not count
        for path in place.iterdir():
            path.unlink()
        place.rmdir()


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else text[:99] + "…"
