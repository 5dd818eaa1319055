"""The register of claims: `experiments/claims.toml`, checked key by key, and the verdicts on all of them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedfuse.core.settings import Settings, validate_settings
from fedfuse.core.words import suggest
from fedfuse.errors import ConfigError
from fedfuse.experiment.figures import experiments_folder
from fedfuse.report.claims import Claim, Direction, Finding, judge_all
from fedfuse.report.reproduction import fill_tables
from fedfuse.report.stored import (
    STORED_COLUMNS,
    StoredResult,
    collect_result,
    digest_of,
    read_results,
    result_path,
)

Words = Annotated[str, Field(min_length=1)]
Scale = Literal["cpu", "paper"]
SCALES: tuple[Scale, ...] = ("cpu", "paper")


class ClaimConfig(Settings):
    """One `[[claims]]` table of the register; see `fedfuse.report.claims.Claim` for what each key means."""

    id: Words
    paper: Words
    place: Words
    says: Words
    methods: tuple[str, ...] = ()
    published: str = ""
    file: str = ""
    score: str = "accuracy"
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    direction: Direction = "above"
    margin: float | None = None
    effect: Literal["difference", "ratio"] = "difference"
    cells: tuple[str, ...] = ("*",)
    beside: str = ""
    untestable: str = ""
    picture: str = ""
    note: str = ""

    @model_validator(mode="after")
    def _check_comparison(self) -> ClaimConfig:
        """A claim is tested by a whole comparison, or says why it cannot be."""
        if self.untestable:
            if self.file or self.picture or self.first:
                raise ValueError("a claim with `untestable` has no `file`, `picture` or `first`; leave them out")
            return self
        if bool(self.file) == bool(self.picture) or not self.first:
            raise ValueError("it needs `file` or `picture`, and `first`; or `untestable` with the reason")
        if self.score not in STORED_COLUMNS:
            near = suggest(self.score, STORED_COLUMNS)
            raise ValueError(f"score is {self.score!r}{near} expected one of {', '.join(STORED_COLUMNS)}")
        needs_margin = self.direction == "level" or self.effect == "ratio" or not self.second
        if self.margin is None and needs_margin:
            raise ValueError("a level, a ratio and a score by itself need a `margin`: how far from what counts")
        return self

    def to_claim(self) -> Claim:
        """The claim as the verdicts know it."""
        return Claim(**{**self.model_dump(), "margin": self.margin or 0.0})


def load_claims(path: Path | None = None) -> list[Claim]:
    """Every claim of the register, in its order.

    Raises:
        ConfigError: one sentence about the first thing that is wrong, with the claim's place in the file.
    """
    path = path or experiments_folder() / "claims.toml"
    found: dict[str, Claim] = {}
    for at, values in enumerate(_read_tables(path), start=1):
        where = f"{path.name}, claim {at} ({values.get('id', 'without id')})"
        try:
            claim = validate_settings(ClaimConfig, values).to_claim()
        except ConfigError as why:
            raise ConfigError(f"{where}: {why}") from why
        if claim.id in found:
            raise ConfigError(f"{where}: the id stands above already; give every claim a name of its own")
        found[claim.id] = replace(claim, scale=_smallest_scale(claim.file, path.parent, where)) if claim.file else claim
    return list(found.values())


def _smallest_scale(file: str, folder: Path, where: str) -> Scale:
    for scale in SCALES:
        if (folder / f"{file}.{scale}.toml").is_file():
            return scale
    raise ConfigError(f"{where}: there is no experiment {file}.cpu.toml beside the register")


def _read_tables(path: Path) -> list[dict[str, Any]]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} cannot be read: {why}; expected a TOML file with [[claims]]") from why
    tables = values.pop("claims", None)
    if values or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path} has {', '.join(values) or 'no claims'}; expected [[claims]] tables and nothing else")
    return tables


def results_folder() -> Path:
    """Where stored results are."""
    return experiments_folder() / "results"


def known_results(scale: str = "cpu", runs: Path | None = None) -> dict[str, StoredResult]:
    """Stored results by name, and what run directories hold of files that have none.

    Args:
        scale: cpu or paper.
        runs: the folder in which `fedfuse reproduce NAME` puts its runs.
    """
    found = read_results(results_folder(), scale)
    for name, digest in file_digests(scale).items():
        folder = runs / name if runs else None
        if name not in found and folder is not None and any(folder.glob("**/ledger.jsonl")):
            found[name] = collect_result(name, scale, digest, folder)
    return found


def file_digests(scale: str = "cpu") -> dict[str, str]:
    """The digest of every experiment file of a scale, by name."""
    root, end = experiments_folder(), f".{scale}.toml"
    return {
        path.relative_to(root).as_posix().removesuffix(end): digest_of(path) for path in sorted(root.rglob(f"*{end}"))
    }


def all_findings(scale: str = "cpu", runs: Path | None = None, claims: Sequence[Claim] | None = None) -> list[Finding]:
    """The verdict on every claim of the register, by stored results and run directories."""
    return judge_all(claims or load_claims(), known_results(scale, runs), file_digests(scale))


def never_run() -> list[str]:
    """Experiment files without a stored result, with their scale."""
    return [
        f"{name}.{scale}"
        for scale in SCALES
        for name in file_digests(scale)
        if not result_path(name, scale, results_folder()).exists()
    ]


def fill_documents() -> dict[Path, str]:
    """The documents of experiments, and those beside them, with their marked parts as stored results have them."""
    results, missing, root = known_results(), never_run(), experiments_folder()
    paths = sorted([*root.rglob("*.md"), *(root.parent / "docs").glob("*.md")])
    return {path: fill_tables(path.read_text(encoding="utf-8"), results, missing) for path in paths}
