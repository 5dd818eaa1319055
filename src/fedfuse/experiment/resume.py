"""Checkpoints: the server's state and what clients remember, so that a killed run ends as an undisturbed one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfuse.core.files import write_atomically
from fedfuse.core.messages import Start
from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.errors import ConfigError, FuseError
from fedfuse.experiment.keys import changed_keys
from fedfuse.wire.codec import encode, read, write
from fedfuse.wire.files import load_model, save_model

KEEP = 2  # the last one, and the one before in case the last was damaged
SEAL = "seal.json"
_OPERATIONAL = frozenset({"allow_dropped", "deadline", "patience", "wait"})  # keys of the server that bind no line


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The last states of one method on one seed.

    `round-000003/` holds the model, the server's memory, and a seal with the checksum of everything that belongs to
    the round. What belongs to one client lies in `parts/`, under its own checksum: it is written when it changes, so
    a round costs what its own clients cost, however many others there are.
    """

    folder: Path
    _written_parts: dict[str, tuple[Params, str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def save(self, state: ServerState, memories: Mapping[str, Params]) -> None:
        """Write a round's state; the seal is written last, so a folder with a seal is whole."""
        round_folder = self._round_folder(state.round)
        save_model(state.model, round_folder / "model.safetensors")
        write(round_folder / "memory.safetensors", state.memory, {"kind": "memory", "round": state.round})
        clients = {f"client/{client}": memory for client, memory in memories.items() if memory}
        seal = {
            "files": {name: _checksum(round_folder / name) for name in ("model.safetensors", "memory.safetensors")},
            "parts": self._write_changed_parts(
                clients | {f"start/{client}": start.params for client, start in state.starts.items()}
            ),
            "specs": {client: start.spec.to_json() for client, start in state.starts.items()},
        }
        with write_atomically(round_folder / SEAL) as file:
            file.write(json.dumps({**seal, "checksum": _text_checksum(seal)}).encode())
        self._tidy()

    def restore(
        self, at_most: int, like: ServerState, trusted: Collection[str] = ()
    ) -> tuple[ServerState, dict[str, Params]] | None:
        """The newest whole state not beyond a round; a damaged one falls back to the one before."""
        for round_ in reversed([r for r in self._rounds() if r <= at_most]):
            with contextlib.suppress(FuseError, OSError, KeyError, ValueError, TypeError, AttributeError):
                return self._load(round_, like, trusted)
        return None

    def clear(self) -> None:
        """Forget all of them: what comes next begins anew."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _load(self, round_: int, like: ServerState, trusted: Collection[str]) -> tuple[ServerState, dict[str, Params]]:
        round_folder, seal = self._round_folder(round_), self._seal(round_)
        for name, checksum in seal["files"].items():
            _check(round_folder / name, checksum)
        model, _ = load_model(round_folder / "model.safetensors", trusted, like.start.spec)
        memory = dict(read(round_folder / "memory.safetensors").tensors)
        found: dict[str, dict[str, Params]] = {"client": {}, "start": {}}
        for name, checksum in seal["parts"].items():
            kind, client = name.split("/", 1)
            found[kind][client] = self._part(checksum)
        specs = {
            client: Spec.from_json(data, trusted).with_prototype_of(like.start.spec)
            for client, data in seal["specs"].items()
        }
        starts = {client: Start(spec, found["start"][client]) for client, spec in specs.items()}
        return replace(like, round=round_, model=model, memory=memory, starts=starts), found["client"]

    def _write_changed_parts(self, parts: Mapping[str, Params]) -> dict[str, str]:
        """Write the parts that changed; what is still the same object has not."""
        known = {name: self._written_parts[name] for name in parts if name in self._written_parts}
        self._written_parts.clear()
        for name, tensors in parts.items():
            before, checksum = known.get(name, (None, ""))
            self._written_parts[name] = (tensors, checksum if before is tensors else self._write_part(tensors))
        return {name: checksum for name, (_, checksum) in self._written_parts.items()}

    def _write_part(self, tensors: Params) -> str:
        """Write a part; nobody waits for the disk, for a torn part does not fit its checksum."""
        data = encode(tensors, {"kind": "part"})
        checksum = hashlib.sha256(data).hexdigest()
        with write_atomically(self._part_path(checksum), durable=False) as file:
            file.write(data)
        return checksum

    def _part(self, checksum: str) -> Params:
        _check(self._part_path(checksum), checksum)
        return dict(read(self._part_path(checksum)).tensors)

    def _tidy(self) -> None:
        """Keep the last rounds and their parts; what has no seal was left by a crash."""
        kept = {self._round_folder(round_) for round_ in self._rounds()[-KEEP:]}
        for round_folder in set(self.folder.glob("round-*")) - kept:
            (round_folder / SEAL).unlink(missing_ok=True)  # first: what has no seal does not count
            shutil.rmtree(round_folder, ignore_errors=True)
        used = set[str]()
        for round_ in self._rounds():
            with contextlib.suppress(FuseError, OSError, ValueError, KeyError):  # a damaged round needs no parts
                used.update(self._seal(round_)["parts"].values())
        for path in set((self.folder / "parts").glob("*")) - {self._part_path(checksum) for checksum in used}:
            path.unlink(missing_ok=True)

    def _seal(self, round_: int) -> dict[str, Any]:
        path = self._round_folder(round_) / SEAL
        seal = dict(json.loads(path.read_bytes()))
        if seal.pop("checksum", None) != _text_checksum(seal):
            raise ConfigError(f"the checkpoint {path} is damaged")
        return seal

    def _round_folder(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}"

    def _part_path(self, checksum: str) -> Path:
        return self.folder / "parts" / f"{checksum}.safetensors"

    def _rounds(self) -> list[int]:
        names = [seal.parent.name.removeprefix("round-") for seal in self.folder.glob(f"round-*/{SEAL}")]
        return sorted(int(name) for name in names if name.isdecimal())


def conflicts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What keeps a run directory from being continued with this configuration, each difference in words.

    More rounds and seeds may be asked for and methods may change: a changed one is run again, alone. Everything else
    must be as it was, for it concerns every line of the ledger.
    """
    free = ("rounds", "seeds", "methods", "name")
    bound = [{key: value for key, value in values.items() if key not in free} for values in (old, new)]
    for values in bound:
        values["server"] = {key: value for key, value in values.get("server", {}).items() if key not in _OPERATIONAL}
    found = [f"{key} {words}" for key, words in changed_keys(*bound).items()]
    found += [f"seeds no longer has {seed}" for seed in old.get("seeds", []) if seed not in new.get("seeds", [])]
    if old.get("rounds", 1) > new.get("rounds", 1):
        found.append(f"rounds was {old.get('rounds', 1)} and is now {new.get('rounds', 1)}")
    return found


def _check(path: Path, checksum: str) -> None:
    if _checksum(path) != checksum:
        raise ConfigError(f"the checkpoint {path} is damaged")


def _text_checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
