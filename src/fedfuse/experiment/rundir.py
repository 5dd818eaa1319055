"""A run directory: whether a run may go on there, its checkpoints, and the record of what the run was made of."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn

from fedfuse.core.files import hold_folder, write_atomically
from fedfuse.core.messages import Start
from fedfuse.core.params import Params
from fedfuse.core.registry import load_method
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.data import Dataset
from fedfuse.engines.code import follow, source
from fedfuse.errors import ConfigError, FuseError
from fedfuse.experiment.config import Experiment, MethodConfig, changed_keys, file_name
from fedfuse.experiment.prepare import PreparedExperiment, Setting, digest_tensors
from fedfuse.experiment.results import Ledger, plain, write_json, write_results
from fedfuse.wire.codec import encode, read, write
from fedfuse.wire.files import load_model, save_model

RECORD = "made-of.json"


_PARTIAL_FILE = re.compile(r"\..+\.[0-9a-f]{16}")  # a file that was being written; see `write_atomically`


@dataclass(slots=True)
class RunFolder:
    """A run directory and the names of what is in it."""

    path: Path
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.path / "ledger.jsonl")

    def lock(self) -> AbstractContextManager[None]:
        """The directory, for this run alone."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as why:
            raise ConfigError(f"cannot write {self.path}: {why.strerror or why}; choose another --out") from why
        return hold_folder(self.path, wait=False)

    def open(self, experiment: Experiment, resume: bool, made_of: Mapping[str, Any]) -> None:
        """Make the directory ready, or say why it cannot be used."""
        config, text, rounds = self.path / "config.toml", experiment.to_toml(), experiment.rounds
        if config.exists():
            if not resume:
                raise ConfigError(f"{self.path} holds a run already; continue it with --resume or choose another --out")
            try:
                old = tomllib.loads(config.read_text(encoding="utf-8"))
            except (OSError, ValueError) as why:
                raise ConfigError(f"{config} cannot be read: {why}") from why
            new = tomllib.loads(text)
            if found := conflicts(old, new):
                raise ConfigError(
                    f"{self.path} holds another run: {_first_few(found)}; set it back or choose another --out"
                )
            labels = list(experiment.recipes())
            same = {label for label, entry in zip(labels, new["methods"], strict=True) if entry in old["methods"]}
            self._refuse_other_code(made_of, same)
            self._set_aside(same)
            rounds = int(old["rounds"])
        elif self.ledger.path.exists() or (resume and self._has_files()):
            raise ConfigError(f"{self.path} is not a run directory: it has no config.toml; choose another --out")
        if resume:
            self._remove_partial_files()
        if rounds < experiment.rounds:
            # The last round is scored differently from others, and exchanges that came after it (a refit) follow the
            # new last round: all of them are done again.
            self.ledger.keep(lambda line: line["round"] < rounds)
        with write_atomically(config) as file:
            file.write(text.encode())
        write_json(self.path / RECORD, made_of)

    def _refuse_other_code(self, made_of: Mapping[str, Any], same: Collection[str]) -> None:
        """Refuse to go on with other code or rows than those that the lines of the ledger come from.

        A directory from before there was such a record goes on.
        """
        record = self.path / RECORD
        if not record.exists() or not any(line["label"] in same for line in self.ledger.lines()):
            return
        try:
            old = json.loads(record.read_bytes())
            found = changes(old, made_of, same)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as why:
            raise ConfigError(
                f"{record} is damaged ({why}); choose another --out, or remove that file if you know that neither code "
                "nor data changed"
            ) from why
        if found:
            raise ConfigError(
                f"{self.path} was begun with other code or data: {_first_few(found)}; set it back or choose "
                "another --out"
            )

    def _set_aside(self, same: Collection[str]) -> None:
        """Put the lines of methods that are gone or have changed into another file, and forget their checkpoints."""
        old, replaced = (
            [line for line in self.ledger.lines() if line["label"] not in same],
            self.path / "replaced.jsonl",
        )
        for line in old:
            Ledger(replaced).append(line)
        for label, seed in {(line["label"], line["seed"]) for line in old}:
            self.checkpoints(label, seed).clear()
        if old:
            self.ledger.keep(lambda line: line["label"] in same)

    def _has_files(self) -> bool:
        """Whether anything is there but what a run killed at its very start left behind."""
        return self.path.is_dir() and any(not _PARTIAL_FILE.fullmatch(path.name) for path in self.path.iterdir())

    def _remove_partial_files(self) -> None:
        """Remove what a killed run wrote by half."""
        self.ledger.mend()
        for path in self.path.rglob(".*"):
            if _PARTIAL_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def checkpoints(self, label: str, seed: int) -> Checkpoints:
        """The checkpoints of one method on one seed."""
        return Checkpoints(self.path / "checkpoints" / f"{file_name(label)}-{seed}")

    def model(self, label: str, seed: int) -> Path:
        """The file of the final model of one method on one seed."""
        return self.path / "models" / f"{file_name(label)}-{seed}.safetensors"

    def write_partition(self, prepared: PreparedExperiment, setting: Setting) -> None:
        """Write which client holds how many rows of each class, for the report."""
        path, classes = self.path / "partition.json", len(prepared.dataset.classes)
        labels, parts = prepared.dataset.labels(), setting.partition
        try:
            seeds = dict(json.loads(path.read_text(encoding="utf-8"))["seeds"])
        except (OSError, ValueError, TypeError, KeyError):  # missing or damaged: every seed writes its own again
            seeds = {}
        counts = dict(zip(parts.clients, parts.counts(labels, classes).tolist(), strict=True))
        server = labels[parts.server].bincount(minlength=classes).tolist()
        seeds[str(setting.seed)] = {"clients": counts, "server": server, **plain(parts.facts)}
        write_json(path, {"classes": list(prepared.dataset.classes), "seeds": seeds})

    def publish(self, experiment: Experiment) -> list[dict[str, Any]]:
        """Bring results.json up to the ledger, whose lines come back in the experiment's own order."""
        labels, seeds = list(experiment.recipes()), list(experiment.seeds)
        known = [line for line in self.ledger.lines() if line["label"] in labels and line["seed"] in seeds]
        lines = sorted(known, key=lambda line: (labels.index(line["label"]), seeds.index(line["seed"]), line["round"]))
        write_results(self.path / "results.json", experiment.name, lines)
        return lines


def _first_few(found: list[str]) -> str:
    return ", ".join(found[:5]) + (f", and {len(found) - 5} more" if len(found) > 5 else "")


_OPERATIONAL = frozenset({"allow_dropped", "deadline", "patience", "wait"})  # keys of the server that bind no line


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


KEEP = 2  # the last one, and the one before in case the last was damaged
SEAL = "seal.json"


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

    def _write_changed_parts(self, parts: Mapping[str, Params]) -> dict[str, str]:
        """Write the parts that changed; what is still the same object has not."""
        known = {name: self._written_parts[name] for name in parts if name in self._written_parts}
        self._written_parts.clear()
        for name, tensors in parts.items():
            before, checksum = known.get(name, (None, ""))
            if before is not tensors:
                data = encode(tensors, {"kind": "part"})
                checksum = hashlib.sha256(data).hexdigest()
                # not durable: a part that a crash tears does not fit its checksum, and the round before is restored
                with write_atomically(self._part_path(checksum), durable=False) as file:
                    file.write(data)
            self._written_parts[name] = (tensors, checksum)
        return {name: checksum for name, (_, checksum) in self._written_parts.items()}

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

    def restore(
        self, at_most: int, like: ServerState, trusted: Collection[str] = ()
    ) -> tuple[ServerState, dict[str, Params]] | None:
        """The newest whole state not beyond a round; a damaged one falls back to the one before."""
        for round_ in reversed([r for r in self._rounds() if r <= at_most]):
            with contextlib.suppress(FuseError, OSError, KeyError, ValueError, TypeError, AttributeError):
                return self._load(round_, like, trusted)
        return None

    def _load(self, round_: int, like: ServerState, trusted: Collection[str]) -> tuple[ServerState, dict[str, Params]]:
        round_folder, seal = self._round_folder(round_), self._seal(round_)
        for name, checksum in seal["files"].items():
            _check(round_folder / name, checksum)
        model, _ = load_model(round_folder / "model.safetensors", trusted, like.start.spec)
        memory = dict(read(round_folder / "memory.safetensors").tensors)
        found: dict[str, dict[str, Params]] = {"client": {}, "start": {}}
        for name, checksum in seal["parts"].items():
            kind, client = name.split("/", 1)
            _check(self._part_path(checksum), checksum)
            found[kind][client] = dict(read(self._part_path(checksum)).tensors)
        specs = {
            client: Spec.from_json(data, trusted).with_prototype_of(like.start.spec)
            for client, data in seal["specs"].items()
        }
        starts = {client: Start(spec, found["start"][client]) for client, spec in specs.items()}
        return replace(like, round=round_, model=model, memory=memory, starts=starts), found["client"]

    def clear(self) -> None:
        """Forget all of them, so that the next run of this method begins at its first round."""
        shutil.rmtree(self.folder, ignore_errors=True)

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


PACKAGES = (
    *("fedfuse", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pydantic"),
    *("numba", "flwr", "POT", "pygmtools"),
)


def environment(dataset: Dataset, workers: int) -> dict[str, Any]:
    """Facts about the software, the machine and the data."""
    facts = {key: fact for key, fact in dataset.facts.items() if fact is not None}
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "workers": workers,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "data": {"name": dataset.name, "classes": len(dataset.classes), **facts},
    }


@cache
def versions() -> Mapping[str, str]:
    """The installed version of every package that matters; it cannot change while we run."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the source tree fedfuse runs from, if it is one."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():  # an installed copy may lie in another project's tree
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


_Code: TypeAlias = type | FunctionType
_WORD = 16  # hexadecimal digits of a digest that are kept


def made_of(prepared: PreparedExperiment, as_objects: bool = False) -> dict[str, Any]:
    """The digests of all that decides a run beyond its configuration, by the file or the key that a user knows it by.

    Args:
        prepared: the experiment.
        as_objects: whether its rows came as objects, whose facts are not ours.
    """
    specs = (prepared.spec, *(spec for _, _, spec in prepared.groups))
    modules = [name.partition(":")[0] for spec in specs if spec.prototype is None for name in spec.foreign]
    named = {
        label: list(_makers(entry)) for label, entry in zip(prepared.recipes, prepared.experiment.methods, strict=True)
    }
    return {
        "fedfuse": {"version": versions().get("fedfuse", "?"), "code": source()[:_WORD]},
        "network": _code_digests([kind for spec in specs for kind in _kinds(spec)], modules),
        "methods": {
            label: _code_digests([*named[label], *_kinds(recipe)]) for label, recipe in prepared.recipes.items()
        },
        "rows": _row_digests(prepared, as_objects),
    }


def _makers(entry: MethodConfig) -> Iterator[_Code]:
    """The functions that make a method's recipe."""
    make = load_method(entry.name).make
    yield make if isinstance(make, FunctionType) else type(make)
    if entry.then is not None:
        yield from _makers(entry.then)


def _kinds(value: object) -> Iterator[_Code]:
    """The classes and functions that a value is made of, at any depth."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, partial):
        yield from _kinds((value.func, value.args, value.keywords))
    elif isinstance(value, nn.Module):
        yield from {type(part) for part in value.modules()}
    elif isinstance(value, tuple | list | set | frozenset):
        for part in value:
            yield from _kinds(part)
    elif isinstance(value, Mapping):
        yield from _kinds(list(value.values()))
    else:
        yield type(value)
        if is_dataclass(value):
            yield from _kinds([getattr(value, f.name) for f in fields(value)])


def _code_digests(kinds: Iterable[_Code], modules: Iterable[str] = ()) -> dict[str, str]:
    """The digest of every file of the user's that some code leads to, and of code that was typed in place."""
    every = set(kinds)
    typed = {kind for kind in every if kind.__module__ == "__main__"}  # a script says more than this: how to run it
    found = follow({*modules, *(kind.__module__ for kind in every - typed)})
    digests = {told.file: told.digest[:_WORD] for told in found.modules.values()}
    texts = {kind.__qualname__: "".join(_texts(kind, set())) for kind in typed}
    return digests | {name: hashlib.sha256(text.encode()).hexdigest()[:_WORD] for name, text in texts.items() if text}


def _texts(kind: _Code, seen: set[_Code]) -> Iterator[str]:
    """The source of typed code, and of what it names that was typed too."""
    seen.add(kind)
    for function in [kind] if isinstance(kind, FunctionType) else vars(kind).values():
        if not isinstance(function, FunctionType):
            continue
        try:
            yield inspect.getsource(function)
        except (OSError, TypeError):  # nothing keeps what was typed here
            continue
        for value in map(function.__globals__.get, _names(function.__code__)):
            if isinstance(value, bool | int | float | str):
                yield repr(value)
            elif isinstance(value, _Code) and value.__module__ == "__main__" and value not in seen:
                yield from _texts(value, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _row_digests(prepared: PreparedExperiment, as_objects: bool) -> dict[str, str]:
    """The digests of rows: those that clients, server and judge have, whatever file or function they came from."""
    dataset, data, judge = prepared.dataset, prepared.experiment.data, prepared.experiment.judge
    rows = None if as_objects else dataset.facts.get("checksum")
    rows = rows or digest_tensors((dataset.train.x, dataset.train.y, dataset.test.x, dataset.test.y))
    facts = repr((rows, dataset.classes, dataset.owners))
    found = {f"data.source = {data.source!r}": hashlib.sha256(facts.encode()).hexdigest()[:_WORD]}
    for key, name, inputs in (
        ("data.unlabelled", data.unlabelled, prepared.unlabelled),
        ("judge.ood", judge.ood, prepared.ood_inputs),
    ):
        found |= {} if inputs is None else {f"{key} = {name!r}": digest_tensors([inputs])}
    return found


def changes(old: Mapping[str, Any], new: Mapping[str, Any], labels: Collection[str]) -> list[str]:
    """What has changed between two such records, in words; of methods only those that are to go on count.

    Example:
        >>> one, other = ({"network": {"net.py": digest, "blocks.py": "c"}} for digest in "ab")
        >>> changes(one, other, [])
        ['net.py changed']
    """
    found = []
    before, now = old.get("fedfuse"), new.get("fedfuse")
    if before and now and before["code"] != now["code"]:
        texts = [f"{told['version']} (code {told['code'][:8]})" for told in (before, now)]
        found.append(f"fedfuse was {texts[0]} and is now {texts[1]}")
    pairs = [(old.get("network", {}), new.get("network", {}))]
    pairs += [(old["methods"][label], new["methods"][label]) for label in labels if label in old.get("methods", {})]
    files = sorted({file for one, other in pairs for file in {*one, *other} if one.get(file) != other.get(file)})
    rows = old.get("rows", {})
    keys = [key for key, digest in new.get("rows", {}).items() if rows.get(key, digest) != digest]
    return [*found, *(f"{file} changed" for file in files), *(f"the rows of {key} changed" for key in keys)]
