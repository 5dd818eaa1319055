"""Results as Python uses them: short in a shell, tables in a notebook, frames for pandas."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

import fedfuse
from fedfuse.errors import ConfigError
from fedfuse.experiment.results import Results

TINY: dict[str, Any] = {
    "name": "a <b> study",
    "rounds": 2,
    "data": {"clients": 2, "train_limit": 60, "test_limit": 30},
    "model": {"name": "mlp", "hidden": [4]},
    "methods": [{"name": "fedavg"}, {"name": "fednova"}],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return fedfuse.run(TINY, out=tmp_path_factory.mktemp("out") / "run", workers=0, memo=False)


def test_a_dictionary_runs_as_a_file_would(results: Results, tmp_path: Path) -> None:
    (tmp_path / "same.toml").write_text((results.folder / "config.toml").read_text())
    again = fedfuse.run(tmp_path / "same.toml", out=tmp_path / "run", workers=0, memo=False)
    assert again.table() == results.table()
    assert TINY["data"] == {"clients": 2, "train_limit": 60, "test_limit": 30}, "what was given is not written to"
    with pytest.raises(ConfigError, match="there is no key 'epochs'; did you mean 'local.epochs'"):
        fedfuse.run(TINY | {"epochs": 3}, out=tmp_path / "bad")


def test_a_dictionary_may_sweep_and_be_changed(tmp_path: Path) -> None:
    values = TINY | {"sweep": {"local.epochs": [1, 2]}}
    swept = fedfuse.run(values, sets=["rounds=1"], out=tmp_path / "both", workers=0, memo=False)
    assert [row["experiment"] for row in swept.rows] == ["a <b> study-1"] * 2 + ["a <b> study-2"] * 2
    assert fedfuse.load(tmp_path / "both").table() == swept.table()


def test_the_repr_is_one_short_line(results: Results) -> None:
    said = repr(results)
    assert said.startswith("Results('a <b> study': fedavg, fednova; seeds 1, rounds 2; files in ")
    assert len(said.splitlines()) == 1
    assert repr(Results("none", Path("x"), ())) == "Results('none': ; seeds 0, rounds 0; files in 'x')"


def test_a_notebook_shows_the_table(results: Results) -> None:
    page = results._repr_html_()
    assert page.count("<tr>") == 3
    assert "<b>a &lt;b&gt; study</b>" in page
    assert "fednova" in page
    assert "**" not in page


def test_the_frame_has_every_row_and_its_numbers(results: Results) -> None:
    frame = results.frame()
    assert len(frame) == 4
    assert list(frame.columns[:5]) == ["experiment", "method", "label", "seed", "round"]
    last = frame[frame["round"] == 2].set_index("label")["accuracy"]
    assert last.to_dict() == {row["label"]: row["accuracy"] for row in results.rows if row["round"] == 2}


def test_without_pandas_it_says_what_to_install(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"needs pandas; install fedfuse\[tables\]"):
        results.frame()
