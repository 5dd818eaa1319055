"""`refit` in an experiment file: one exchange more, without training, and it helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfuse.errors import ConfigError
from fedfuse.experiment.config import load_experiment
from fedfuse.experiment.results import Ledger
from fedfuse.experiment.run import execute

FILE = """
rounds = {rounds}
[data]
source = "digits"
train_limit = 400
clients = 4
partition = {{ kind = "dirichlet", alpha = 0.1 }}
[model]
name = "mlp"
hidden = [20]
[[methods]]
name = "fedavg"
[[methods]]
name = "fedavg"
refit = {refit}
"""


def lines(folder: Path, rounds: int = 1, refit: str = '"head"', resume: bool = False) -> list[dict[str, object]]:
    path = folder / "e.toml"
    path.write_text(FILE.format(rounds=rounds, refit=refit))
    execute(load_experiment(path), folder / "run", workers=0, resume=resume)
    return list(Ledger(folder / "run" / "ledger.jsonl").lines())


def test_refit_is_one_more_exchange_in_which_nobody_trains(tmp_path: Path) -> None:
    found = lines(tmp_path)
    assert [(line["label"], line["round"]) for line in found] == [
        ("fedavg", 1),
        ("fedavg+refit", 1),
        ("fedavg+refit", 2),
    ]
    assert found[1]["accuracy"] == found[0]["accuracy"]
    assert found[2]["accuracy"] > found[0]["accuracy"] + 0.2  # type: ignore[operator]
    assert found[2]["remembered"] == 0
    again = lines(tmp_path, rounds=2, resume=True)
    assert sorted(line["round"] for line in again if line["label"] == "fedavg+refit") == [1, 2, 3]


def test_a_table_has_the_options_of_refit(tmp_path: Path) -> None:
    assert lines(tmp_path, refit='{ head = "gaussian", penalty = 0.01 }')[-1]["round"] == 2
    with pytest.raises(ConfigError, match="method 'refit' has no option 'penalti'; did you mean 'penalty'"):
        lines(tmp_path, refit="{ penalti = 1 }")
