"""The page: whole, safe, and what its sentences say."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedfuse import report
from fedfuse.errors import ConfigError
from fedfuse.report import read_run, write_page
from fedfuse.report.page import LIMIT, cautions, fact_text, flatten, method_facts, overall, render, tables, verdict
from fedfuse.report.read import Run
from fedfuse.report.scores import summary

Make = Callable[..., Path]


class Reader(HTMLParser):
    """Collects the elements, and the cells of the first summary table."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def elements(text: str) -> list[tuple[str, dict[str, str | None]]]:
    reader = Reader()
    reader.feed(text)
    return reader.elements


@pytest.fixture
def page(tmp_path: Path, make_run: Make) -> str:
    return write_page([make_run(tmp_path / "run")], tmp_path / "deep" / "page.html").read_text(encoding="utf-8")


def test_the_page_says_what_the_ledger_holds(page: str, tmp_path: Path) -> None:
    rows = [row for row in read_run(tmp_path / "run").rows if row["label"] == "fedlpa(damping=0.001)"]
    scores = [row["accuracy"] for row in rows]
    mean, sd = 100 * np.mean(scores), 100 * np.std(scores, ddof=1)
    assert f'<span class="mean">{mean:.1f}</span><span class="sd"> ± {sd:.1f}</span>' in page
    values = [
        float(attrs["data-value"] or "nan") for tag, attrs in elements(page) if tag == "td" and "data-value" in attrs
    ]
    assert values[0] == pytest.approx(np.mean(scores))  # the best method comes first, and so does accuracy
    assert f"fedlpa(damping=0.001) is best: {mean:.1f}\u00a0±\u00a0{sd:.1f}\u00a0% accuracy over 3 seeds" in page
    for words in ("Who holds what", "Reliability", "Fairness", "Bytes against accuracy", "What leaves the clients"):
        assert words in page
    for words in ("second moments of activations", "layer weights", "Confusion", "fashion-mnist", "0a1b2c3"):
        assert words in page


def test_nothing_of_a_hostile_name_is_markup(page: str, hostile: str) -> None:
    assert hostile not in page
    assert "&lt;img src=x onerror=" in page
    assert "\u202e" not in page
    assert "img" not in {tag for tag, _ in elements(page)}
    assert sum(tag == "script" for tag, _ in elements(page)) == 1
    assert not any(name.startswith("on") for _, attrs in elements(page) for name in attrs)


def test_the_page_is_self_contained(page: str) -> None:
    links = [value for _, attrs in elements(page) for name, value in attrs.items() if name in ("src", "href")]
    assert all(value is not None and value.startswith(("#", "data:")) for value in links)
    assert "url(" not in page
    assert "@import" not in page
    ids = [attrs["id"] for _, attrs in elements(page) if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_one_round_shows_every_seed_and_many_rounds_show_curves(tmp_path: Path, make_run: Make, page: str) -> None:
    assert "Accuracy of every seed" in page
    many = write_page([make_run(tmp_path / "many", rounds=3)], tmp_path / "many.html").read_text(encoding="utf-8")
    assert "Accuracy of every seed" not in many
    assert "Learning curves" in many


def test_refused_and_dropped_are_listed_or_said_to_be_none(tmp_path: Path, make_run: Make, page: str) -> None:
    assert "a number in (0, 1e6]" in page
    assert "no answer within 60 s" in page
    assert "at most 3.1, going by the round&#39;s other clients" in page
    clean = write_page([make_run(tmp_path / "clean", hostile=False)], tmp_path / "clean.html")
    assert "Every reply was admitted as it was" in clean.read_text(encoding="utf-8")


def test_several_runs_are_compared(tmp_path: Path, make_run: Make) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", rounds=2)
    text = write_page([a, b, a], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>2 runs compared · fedfuse</title>" in text
    assert "one-shot-fashion (a)" in text  # one name, told apart by directory
    assert "one-shot-fashion (b)" in text
    assert "fedlpa(damping=0.001) is best in 2 of 2 runs." in text
    ids = [attrs["id"] for _, attrs in elements(text) if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_bad_input_is_one_sentence_and_leaves_no_page(tmp_path: Path, make_run: Make) -> None:
    out = tmp_path / "page.html"
    with pytest.raises(ConfigError, match="no run directory"):
        write_page([], out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no ledger\.jsonl"):
        write_page([tmp_path / "empty"], out)
    assert not out.exists()
    run = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot write"):
        write_page([run], run / "ledger.jsonl" / "page.html")
    with pytest.raises(ConfigError, match="cannot write"):
        write_page([run], tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]


def test_an_old_page_is_replaced(tmp_path: Path, make_run: Make) -> None:
    out = tmp_path / "page.html"
    out.write_text("old")
    write_page([make_run(tmp_path / "run")], out)
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_is_small(tmp_path: Path, make_run: Make) -> None:
    out = write_page([make_run(tmp_path / "run", rounds=20)], tmp_path / "page.html")
    assert out.stat().st_size < 1_000_000


def test_many_clients_do_not_make_a_heavy_page(tmp_path: Path, make_run: Make) -> None:
    out = write_page([make_run(tmp_path / "run", clients=1000, seeds=2)], tmp_path / "page.html")
    assert out.stat().st_size < 3_000_000


def test_the_report_reads_run_directories_and_imports_nothing_that_trains() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(report.__file__).parent.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    foreign = {name for name in named if name.split(".")[0] not in sys.stdlib_module_names}
    ours = {name for name in foreign if name.startswith("fedfuse")}
    assert {name.split(".")[0] for name in foreign - ours} <= {
        "numpy",
        "scipy",
        "pydantic",
        "matplotlib",
        "markupsafe",
        "jinja2",
        "rich",
    }
    plain = {
        "fedfuse.errors",
        *(f"fedfuse.core.{name}" for name in ("sealed", "files", "escape")),
    }
    assert all(name in plain or name.startswith("fedfuse.report") for name in ours)


def test_the_script_is_the_one_the_policy_allows(page: str) -> None:
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.floats(0, 1) | st.text(max_size=4)
names = st.text(max_size=4)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
lists = st.lists(scalars, max_size=4)
numbers = "accuracy nll ece brier client_accuracy_mean bytes_up bytes_down train_seconds trained parameters selected"
shapes = {
    "per_class": lists,
    "confusion": st.lists(lists, max_size=3) | st.just([[1, 2], [3, 4]]),
    "reliability": st.fixed_dictionaries({}, optional=dict.fromkeys(("confidence", "accuracy", "count"), lists)),
    "clients": st.dictionaries(names, st.fixed_dictionaries({}, optional={"own_accuracy": scalars}), max_size=4),
    "facts": st.dictionaries(names, st.dictionaries(names, st.dictionaries(names, scalars, max_size=3)), max_size=3),
    "refused": st.lists(st.dictionaries(st.sampled_from(["client", "field"]), junk), max_size=2),
    "dropped": junk,
    "reveals": junk,
}
lines = st.fixed_dictionaries(
    {"label": st.sampled_from(["a", "b<("]), "seed": st.integers(0, 1), "round": st.integers(1, 2)},
    optional=dict.fromkeys(numbers.split(), scalars) | {key: shape | junk for key, shape in shapes.items()},
)
dealt = st.fixed_dictionaries({}, optional={"clients": st.dictionaries(names, lists, max_size=3), "server": lists})


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(lines, min_size=1, max_size=6), junk | st.lists(names), dealt | junk, junk)
def test_whatever_the_files_hold_a_page_comes_out(
    rows: list[dict[str, object]], classes: object, seed: object, environment: object
) -> None:
    unique = {(row["label"], row["seed"], row["round"]): {"method": "m", **row} for row in rows}
    partition = {"classes": classes, "seeds": {"0": seed}}
    text = render([Run("x", "", {"e": environment}, partition, tuple(unique.values()))])
    assert text.startswith("<!doctype html>")
    assert text.endswith("</html>")
    assert not re.search(r' (x|y|d|width|height|fill-opacity|data-value)="[^"]*(nan|inf)', text)


def test_numbers_at_the_edge_of_floats_are_drawn(tmp_path: Path) -> None:
    rows = [
        {"method": "a", "seed": s, "round": r, "accuracy": 0.5, "nll": 1e308 * (s or 1e-308), "bytes_up": 10**300}
        for s in (0, 1)
        for r in (1, 2)
    ]
    (tmp_path / "ledger.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert write_page([tmp_path], tmp_path / "page.html").stat().st_size > 1000


def rows(rounds: int = 1, **accuracies: list[float | None]) -> list[dict[str, object]]:
    return [
        {"method": label, "seed": seed, "round": rounds, "accuracy": a}
        for label, scores in accuracies.items()
        for seed, a in enumerate(scores)
    ]


def said(found: list[dict[str, object]]) -> str:
    return verdict(summary(found))


def test_pairs_that_tell_the_best_apart() -> None:
    """Seed 1 is easier by 20 points, so the spreads overlap; the pairs do not care."""
    assert said(rows(20, fedavg=[0.60, 0.80, 0.70], wb=[0.65, 0.85, 0.76])) == (
        "wb is best: 75.3 ± 10.0 % accuracy after round 20 over 3 seeds, 5.3 points ahead of fedavg (70.0 ± 10.0 %). "
        "More than chance: over 3 shared seeds the difference is 3.9 to 6.8 points (95 % interval, p = 0.0039 by a "
        "paired t-test); it is ahead on 3 of them."
    )


def test_pairs_that_do_not() -> None:
    text = said(rows(fedavg=[0.6, 0.9], wb=[0.5, 0.95], x=[0.8, 0.78]))
    assert text.startswith("x is best: 79.0 ± 1.4 % accuracy over 2 seeds, 4.0 points ahead of fedavg (75.0 ± 21.2 %).")
    assert "This may be chance: over 2 shared seeds" in text
    assert text.endswith("it is ahead on 1 of them.")


def test_methods_without_a_common_seed_are_not_tested() -> None:
    found = [*rows(a=[0.5]), {"method": "b", "seed": 7, "round": 1, "accuracy": 0.6}]
    assert said(found).endswith("They share no seed, so the difference is not tested.")


def test_what_prints_alike_is_level() -> None:
    assert said(rows(a=[0.80001], b=[0.8], c=[0.5])) == "a and b are level at 80.0 % accuracy."


def test_one_method_and_none() -> None:
    assert said(rows(a=[0.7, 0.9])) == "a reaches 80.0 ± 14.1 % accuracy over 2 seeds."
    assert said(rows(a=[None])) == "No accuracy was recorded."


def test_an_exchange_without_training_is_no_further_round() -> None:
    def row(method: str, at: int, steps: int) -> dict[str, Any]:
        return {"method": method, "seed": 0, "round": at, "accuracy": 0.5, "clients": {"a": {"steps": steps}}}

    refitted = summary([row("fedavg", 1, 4), row("refit", 1, 4), row("refit", 2, 0), row("ridge", 1, 0)])
    assert [found.ending for found in refitted] == [0, 1, 0]
    assert cautions(refitted) == []
    assert len(cautions(summary([row("fedavg", 1, 4), row("longer", 1, 4), row("longer", 2, 4)]))) == 1


def test_cautions_name_what_does_not_compare() -> None:
    assert cautions(summary(rows(a=[0.5, 0.6], b=[0.5, 0.6]))) == []
    found = [*rows(a=[0.5, 0.6], b=[0.5, None]), {"method": "c", "seed": 0, "round": 3, "accuracy": 0.1}]
    assert cautions(summary(found)) == [
        "The methods stand at different rounds (1 to 3): compare with care.",
        "The methods were not run on the same seeds: compare with care.",
        "b has an accuracy on 1 of 2 seeds only.",
    ]


def test_overall_counts_wins() -> None:
    assert overall({"1": "a", "2": "b", "3": "b"}) == "b is best in 2 of 3 runs, a in 1."


def row(seed: int, facts: object) -> dict[str, object]:
    return {"seed": seed, "round": 1, "facts": facts}


def test_numbers_are_averaged_and_words_are_listed() -> None:
    (note,) = method_facts({"wb": [row(0, {"steps": 4, "solver": "cg"}), row(1, {"steps": 6, "solver": "ea"})]})
    assert note.lines == (("steps", "5 ± 1.4"), ("solver", "cg; ea"))
    assert note.maps == ()


def test_tables_of_numbers_become_maps() -> None:
    facts = {"layer_weights": {"fc1": {"a": 0.25, "b": 0.75}, "fc2": {"b": 1.0}}, "deep": {"x": {"y": {"z": 1.0}}}}
    assert list(tables(facts)) == ["layer_weights", "deep.x"]
    assert flatten(facts) == {}
    (note,) = method_facts({"wb": [row(3, facts)]})
    assert note.maps[0].title == "layer weights"
    assert note.maps[0].note == "Seed 3, round 1."
    assert "fc1, b: 0.75" in note.maps[0].picture
    assert "fc2, a" not in note.maps[0].picture


def test_signs_are_owned_up_to() -> None:
    (note,) = method_facts({"wb": [row(0, {"shift": {"fc1": {"a": -0.5, "b": 0.5}}})]})
    assert "without the sign" in note.maps[0].note


def test_long_things_are_shortened() -> None:
    assert fact_text({f"c{k}": k for k in range(11)}) == "11 numbers: least 0, median 5, most 10"
    assert fact_text(list("abcdefghij")) == "a, b, c, d, e, f, g, h, … (10 in all)"
    assert len(fact_text("x" * 1000)) == 200
    (note,) = method_facts({"wb": [row(0, {f"k{k}": k for k in range(LIMIT + 5)})]})
    assert (len(note.lines), note.more) == (LIMIT, 5)


def test_who_noted_nothing_is_not_shown() -> None:
    assert method_facts({"wb": [row(0, {})], "fedavg": [row(0, None)]}) == []
