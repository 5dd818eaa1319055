"""The register, the stored results and the documents made of them say the same."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from fedfuse.core.catalogue import list_catalogue
from fedfuse.experiment.config import load_experiments
from fedfuse.experiment.reproduce import (
    SCALES,
    all_figures,
    all_findings,
    fill_documents,
    load_claims,
    never_run,
    results_folder,
)
from fedfuse.report.claims import read_results
from fedfuse.report.reproduction import NEVER_RUN, reproduction_document

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def own_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFUSE_EXPERIMENTS", str(ROOT / "experiments"))


def test_all_five_papers_and_ours_are_in_the_register() -> None:
    claims = load_claims()
    assert {claim.paper for claim in claims} == {"FedLPA", "SWA", "AMS", "FedDUAP", "BA-BFL", "fedfuse"}
    assert len([claim for claim in claims if claim.paper != "fedfuse"]) >= 40
    known = {entry["name"] for entry in list_catalogue()}
    assert all(set(claim.methods) <= known for claim in claims)
    assert {claim.picture for claim in claims if claim.picture} <= all_figures().keys()


def test_every_claim_names_labels_and_experiments_that_its_file_has() -> None:
    for claim in load_claims():
        if not claim.file:
            continue
        scale = next(s for s in SCALES if (ROOT / "experiments" / f"{claim.file}.{s}.toml").exists())
        cells = load_experiments(ROOT / "experiments" / f"{claim.file}.{scale}.toml", [])
        labels = set(cells[0].recipes())
        assert {*claim.first, *claim.second} <= labels, f"{claim.id}: {({*claim.first, *claim.second}) - labels}"
        base = claim.file.rpartition("/")[2]
        names = [cell.name.removeprefix(f"{base}-").removesuffix("-niid-bench") for cell in cells]
        for pattern in claim.cells:
            assert any(fnmatchcase(name, pattern) for name in names), f"{claim.id}: {pattern} is none of {names}"


def test_verdicts_in_the_document_are_those_of_the_stored_results() -> None:
    written = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert written == reproduction_document(all_findings()), "write it anew: fedfuse reproduce --verdicts"


def test_tables_in_documents_are_those_of_the_stored_results() -> None:
    for path, text in fill_documents().items():
        written, filled = (NEVER_RUN.sub("", words) for words in (path.read_text(encoding="utf-8"), text))
        assert written == filled, f"{path} is older than its results: fedfuse reproduce --store"


def test_what_documents_call_never_run_has_no_result() -> None:
    """A file that was added since may be missing in the list; one that was run may not stand in it."""
    never = never_run()
    for path in (ROOT / "experiments").glob("*/README.md"):
        for part in NEVER_RUN.finditer(path.read_text(encoding="utf-8")):
            small, _, large = part[0].partition("as published")
            listed = [f"{part['folder']}/{name}.cpu" for name in re.findall(r"`([^`]+)`", small)]
            listed += [f"{part['folder']}/{name}.paper" for name in re.findall(r"`([^`]+)`", large)]
            assert set(listed) <= set(never), f"{path} is older than its results: fedfuse reproduce --store"


def test_stored_results_are_small_and_have_their_file() -> None:
    for scale in SCALES:
        for name in read_results(results_folder(), scale):
            assert (ROOT / "experiments" / f"{name}.{scale}.toml").is_file() or name in all_figures()
    assert all(path.stat().st_size < 40_000 for path in results_folder().rglob("*.json"))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    from fedfuse.cli.results import write_documents, write_verdicts

    write_documents()
    write_verdicts("cpu", None, as_json=False)
