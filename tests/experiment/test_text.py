"""Experiments on texts: from a file to perplexity in the ledger, the table and the progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.run import execute
from fedfuse.report.read import read_run
from fedfuse.report.tables import markdown, summary

NETWORK = {"width": 8, "heads": 2, "depth": 1}


@pytest.fixture
def letters(tmp_path: Path) -> str:
    """Three writers with words of their own, and whether each line is glad."""
    lines = [
        {"text": f"{who} {'sings' if n % 2 else 'weeps'} {word * 3}", "label": "glad" if n % 2 else "sad", "by": who}
        for who, word in (("ann", "la "), ("bob", "di "), ("cid", "do "))
        for n in range(12)
    ]
    (tmp_path / "letters.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "letters.jsonl")


def data(source: str) -> dict[str, Any]:
    options = {"client": "by", "length": 16}
    return {"source": source, "options": options, "partition": {"kind": "natural"}, "validation_fraction": 0.2}


def test_a_language_model_is_judged_by_perplexity(
    tiny: Callable[..., Experiment], letters: str, tmp_path: Path
) -> None:
    model = {"name": "transformer", **NETWORK}
    experiment = tiny("fedavg", "fedlpa", task="language-model", data=data(letters), model=model, rounds=2)
    prepared = prepare(experiment)
    assert prepared.spec.options["tokens"] == len(prepared.dataset.vocabulary) == len(prepared.dataset.classes)
    execute(experiment, tmp_path / "out", workers=0)
    run = read_run(tmp_path / "out")
    last = [row for row in run.rows if row["round"] == 2]
    assert len(last) == 2
    assert all(row["perplexity"] > 1 and row["own_perplexity_mean"] > 1 for row in last)
    assert set(last[0]["clients"]) == {"ann", "bob", "cid"}
    assert "| method | perplexity | accuracy" in markdown(summary(run.rows))


def test_texts_are_classified_by_several_networks_together(
    tiny: Callable[..., Experiment], letters: str, tmp_path: Path
) -> None:
    model = {"name": "text_classifier", **NETWORK}
    experiment = tiny("ensemble", "ams", task="text-classification", data=data(letters), model=model, rounds=1)
    execute(experiment, tmp_path / "out", workers=0)
    rows = read_run(tmp_path / "out").rows
    assert {row["label"] for row in rows} == {"ensemble", "ams"}
    assert all(0 <= row["accuracy"] <= 1 for row in rows)


def test_a_check_tells_of_each_method(tiny: Callable[..., Experiment], letters: str) -> None:
    model = {"name": "transformer", **NETWORK}
    experiment = tiny("fedavg", "ams", "newton", task="language-model", data=data(letters), model=model, rounds=1)
    flaws = prepare(experiment).flaws()
    assert list(flaws) == ["ams", "newton"]
    assert "needs rows of one class each" in str(flaws["ams"])


def test_tokens_have_no_scale(tiny: Callable[..., Experiment], letters: str) -> None:
    experiment = tiny(task="language-model", data=data(letters) | {"standardize": True}, model={"name": "transformer"})
    with pytest.raises(Exception, match="are tokens, which have no scale"):
        prepare(experiment)
