"""Pictures of Bayesian layers: the numbers behind them, and that they are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedfuse.core.registry import find_method
from fedfuse.experiment.reproduce import all_figures, experiments_folder, load_figures

FIGURES = experiments_folder() / "figures"
variances: Any = load_figures(FIGURES / "variances.py")
Federation = variances.Federation
by_layers = variances.by_layers
draw_deviations = variances.draw_deviations
draw_layers = variances.draw_layers
scores_by_layers = variances.scores_by_layers

PNG = b"\x89PNG"


def line(label: str, seed: int, round_: int, **scores: Any) -> dict[str, Any]:
    method = label.partition("(")[0]
    return {"method": method, "label": label, "seed": seed, "round": round_, "train_seconds": 2.0 * round_} | scores


def ledger() -> list[dict[str, Any]]:
    labels = [
        "fedavg",
        "rklb(last=0)",
        "rklb(last=1)",
        "rklb(last=3)",
        "wb(last=1)",
        "aalv(last=3, noise=False)",
        "moon",
    ]
    return [
        line(
            label,
            seed,
            r,
            nll=1.0 / r + 0.1 * seed,
            accuracy=0.5,
            ece=0.1,
            client_accuracy_weighted=0.4,
            client_accuracy_worst10=0.2,
        )
        for label in labels
        for seed in (0, 1)
        for r in (1, 2)
    ]


def test_scores_are_those_of_the_last_round_by_rule_and_number_of_layers() -> None:
    found = scores_by_layers(ledger())
    assert found["nll"].keys() == {"fedavg", "rklb", "wb"}  # neither controls nor other methods
    assert found["nll"]["rklb"].keys() == {0, 1, 3}
    assert found["nll"]["rklb"][3] == pytest.approx([0.5, 0.6])
    assert found["train_seconds"]["wb"][1] == [3.0, 3.0]


def test_rounds_that_were_remembered_tell_no_time() -> None:
    rows = [line("wb(last=1)", 0, 1, remembered=3), line("wb(last=1)", 0, 2, remembered=0)]
    assert scores_by_layers(rows)["train_seconds"]["wb"][1] == [4.0]
    assert "train_seconds" not in scores_by_layers(rows[:1])


def test_a_runs_ledger_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("\n".join(json.dumps(row) for row in ledger()))
    (path,) = draw_layers(tmp_path)
    assert path.read_bytes().startswith(PNG)
    assert by_layers(ledger()[:1], tmp_path / "new").read_bytes().startswith(PNG)


def test_the_pictures_can_be_asked_for_by_name() -> None:
    assert {"ba-bfl-deviations", "ba-bfl-layers"} <= all_figures().keys()


def test_a_small_federation_gives_lines_and_a_last_cohort() -> None:
    federation = Federation.of()
    (row,) = federation.rounds(find_method("rklb").recipe(last=1), 1)
    assert (row["label"], row["round"]) == ("rklb(last=1)", 1)
    assert row["accuracy"] > 0.1
    cohort, before = federation.last_cohort(find_method("rklb").recipe(last=1), 0)
    assert len(cohort) == 6
    assert len(before["net.classifier.log_variance"].unique()) == 1


@pytest.mark.slow
def test_both_are_drawn_from_training(tmp_path: Path) -> None:
    for draw in (draw_deviations, draw_layers):
        (path,) = draw(tmp_path)
        assert path.read_bytes().startswith(PNG)
