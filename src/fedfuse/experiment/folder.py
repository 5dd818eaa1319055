"""A run directory: what lies in it under which name, and whether a run may go on there."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfuse.core.files import write_atomically
from fedfuse.core.lock import hold_folder
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.keys import file_name
from fedfuse.experiment.ledger import Ledger, plain, write_json, write_results
from fedfuse.experiment.made_of import FILE as MADE_OF
from fedfuse.experiment.made_of import changes
from fedfuse.experiment.prepare import PreparedExperiment, Setting
from fedfuse.experiment.resume import Checkpoints, conflicts

_PARTIAL_FILE = re.compile(r"\..+\.[0-9a-f]{16}")  # a file that was being written; see `write_atomically`


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run directory and the names of what is in it."""

    path: Path

    @property
    def ledger(self) -> Ledger:
        """Its ledger."""
        return Ledger(self.path / "ledger.jsonl")

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
            old, new = _read_toml(config), tomllib.loads(text)
            if found := conflicts(old, new):
                more = f", and {len(found) - 5} more" if len(found) > 5 else ""
                raise ConfigError(
                    f"{self.path} holds another run: {', '.join(found[:5])}{more}; set it back or choose another --out"
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
            self._drop_round(rounds)
        with write_atomically(config) as file:
            file.write(text.encode())
        write_json(self.path / MADE_OF, made_of)

    def _refuse_other_code(self, made_of: Mapping[str, Any], same: Collection[str]) -> None:
        """Refuse to go on with other code or rows than those that the lines of the ledger come from.

        A directory from before there was such a record goes on.
        """
        record = self.path / MADE_OF
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
            more = f", and {len(found) - 5} more" if len(found) > 5 else ""
            raise ConfigError(
                f"{self.path} was begun with other code or data: {', '.join(found[:5])}{more}; set it back or choose "
                "another --out"
            )

    def _set_aside(self, same: Collection[str]) -> None:
        """Put the lines of methods that are gone or have changed into another file, and forget their checkpoints."""
        old = [line for line in self.ledger.lines() if line["label"] not in same]
        for line in old:
            Ledger(self.path / "replaced.jsonl").append(line)
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

    def _drop_round(self, last: int) -> None:
        """A round that was the last one is scored differently, so it is done again when rounds are added.

        So is an exchange that came after it, for a refit follows the new last round.
        """
        self.ledger.keep(lambda line: line["round"] < last)

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
        seeds = _seeds_in(path)
        counts = dict(zip(parts.clients, parts.counts(labels, classes).tolist(), strict=True))
        server = labels[parts.server].bincount(minlength=classes).tolist()
        seeds[str(setting.seed)] = {"clients": counts, "server": server, **plain(parts.facts)}
        write_json(path, {"classes": list(prepared.dataset.classes), "seeds": seeds})

    def ordered_lines(self, experiment: Experiment) -> list[dict[str, Any]]:
        """The ledger in the experiment's own order: method, seed, round."""
        labels, seeds = list(experiment.recipes()), list(experiment.seeds)
        known = [line for line in self.ledger.lines() if line["label"] in labels and line["seed"] in seeds]
        return sorted(known, key=lambda r: (labels.index(r["label"]), seeds.index(r["seed"]), r["round"]))

    def publish(self, experiment: Experiment) -> None:
        """Bring results.json up to the ledger."""
        write_results(self.path / "results.json", experiment.name, self.ordered_lines(experiment))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} cannot be read: {why}") from why


def _seeds_in(path: Path) -> dict[str, Any]:
    """The seeds in a partition.json; none if it is missing or damaged, because every seed writes its own again."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["seeds"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
