"""Claims, stored results and verdicts, against numbers that were made up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fedfuse.errors import ConfigError
from fedfuse.report.claims import (
    VERDICTS,
    Claim,
    StoredResult,
    collect_result,
    digest_of,
    judge_all,
    judge_claim,
    read_result,
    read_results,
    write_result,
)
from fedfuse.report.reproduction import (
    fill_tables,
    method_verdicts,
    reproduction_document,
    reproduction_page,
    stored_table,
)


def result(**cells: dict[str, dict[int, float]]) -> StoredResult:
    """A stored result of accuracies: per cell and label, by seed."""
    return StoredResult(
        "x/t",
        "cpu",
        "now",
        {cell: {label: {"accuracy": values} for label, values in methods.items()} for cell, methods in cells.items()},
    )


def claim(**said: object) -> Claim:
    usual = {"file": "x/t", "first": ("a",), "second": ("b",)}
    return Claim(id="c", paper="X", place="Table 1", says="a is above b", **{**usual, **said})  # type: ignore[arg-type]


GOOD = {"a": {0: 0.80, 1: 0.82, 2: 0.81}, "b": {0: 0.50, 1: 0.51, 2: 0.52}}
NOISY = {"a": {0: 0.90, 1: 0.52, 2: 0.60}, "b": {0: 0.50, 1: 0.51, 2: 0.52}}
WORSE = {"a": {0: 0.40, 1: 0.41, 2: 0.42}, "b": {0: 0.50, 1: 0.52, 2: 0.51}}


def test_the_effect_is_the_paired_mean_in_points_with_students_interval() -> None:
    found = judge_claim(claim(), {"x/t": result(one=GOOD)})
    gaps = [30.0, 31.0, 29.0]
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(30.0)
    half = 4.302653 * 1.0 / math.sqrt(3)  # Student's t with two degrees of freedom, sd of the gaps is 1
    assert (found.effect.low, found.effect.high) == pytest.approx((30.0 - half, 30.0 + half), abs=1e-5)
    assert (found.effect.n, found.cases, found.agreeing) == (len(gaps), 1, 1)
    assert found.verdict == "holds"


def test_a_claim_holds_only_beyond_its_margin() -> None:
    results = {"x/t": result(one=GOOD)}
    assert judge_claim(claim(margin=20.0), results).verdict == "holds"
    assert judge_claim(claim(margin=29.0), results).verdict == "holds in part"  # the interval reaches below it
    assert judge_claim(claim(margin=31.0), results).verdict == "does not hold"
    assert judge_claim(claim(direction="below"), results).verdict == "does not hold"


def test_what_chance_could_have_done_holds_in_part() -> None:
    assert judge_claim(claim(), {"x/t": result(one=NOISY)}).verdict == "holds in part"
    one_seed = {label: {0: values[0]} for label, values in GOOD.items()}
    found = judge_claim(claim(), {"x/t": result(one=one_seed)})
    assert found.verdict == "holds in part"  # one seed says nothing of chance
    assert found.effect is not None
    assert found.effect.low is None


def test_a_claim_about_several_cases_holds_in_all_of_them_or_in_part() -> None:
    both = judge_claim(claim(), {"x/t": result(one=GOOD, two=WORSE)})
    assert (both.verdict, both.agreeing, both.cases) == ("holds in part", 1, 2)
    assert both.effect is not None
    assert both.effect.mean == pytest.approx((30.0 - 10.0) / 2)
    assert judge_claim(claim(cells=("one",)), {"x/t": result(one=GOOD, two=WORSE)}).verdict == "holds"
    assert judge_claim(claim(cells=("t*",)), {"x/t": result(one=GOOD, two=WORSE)}).verdict == "does not hold"


def test_level_means_within_the_margin_on_both_sides() -> None:
    near = {"a": {0: 0.50, 1: 0.52, 2: 0.51}, "b": {0: 0.505, 1: 0.515, 2: 0.512}}
    assert judge_claim(claim(direction="level", margin=3.0), {"x/t": result(one=near)}).verdict == "holds"
    assert judge_claim(claim(direction="level", margin=3.0), {"x/t": result(one=WORSE)}).verdict == "does not hold"


def test_ratios_and_scores_by_themselves() -> None:
    costs = StoredResult("x/t", "cpu", "", {"t": {m: {"bytes_up": {0: v, 1: v}} for m, v in (("a", 2.5), ("b", 1.0))}})
    about = claim(score="bytes_up", effect="ratio", direction="below", margin=1.25)
    found = judge_claim(about, {"x/t": costs})
    assert found.verdict == "does not hold"
    assert found.effect is not None
    assert found.effect.mean == 2.5
    alone = claim(second=(), margin=79.0)
    assert judge_claim(alone, {"x/t": result(one=GOOD)}).verdict == "holds in part"
    assert judge_claim(claim(second=(), margin=20.0), {"x/t": result(one=GOOD)}).verdict == "holds"


def test_cells_can_be_compared_with_each_other() -> None:
    found = judge_claim(claim(second=("a",), cells=("one",), beside="two"), {"x/t": result(one=GOOD, two=WORSE)})
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(40.0)


def test_nothing_measured_is_not_run_and_says_what_is_missing() -> None:
    assert judge_claim(claim(), {}).missing == ("x/t",)
    gone = judge_claim(claim(second=("c",)), {"x/t": result(one=GOOD)})
    assert (gone.verdict, gone.missing) == ("not run", ("a and c, one",))
    half = judge_claim(claim(second=("b", "c")), {"x/t": result(one=GOOD)})
    assert (half.verdict, half.missing) == ("holds in part", ("a and c, one",))
    assert judge_claim(claim(cells=("three",)), {"x/t": result(one=GOOD)}).verdict == "not run"


def test_an_experiment_that_was_not_finished_keeps_a_claim_from_holding_whole() -> None:
    part = StoredResult("x/t", "cpu", "", result(one=GOOD).cells, unfinished=("two",))
    found = judge_claim(claim(), {"x/t": part})
    assert (found.verdict, found.missing) == ("holds in part", ("two",))
    assert judge_claim(claim(cells=("one",)), {"x/t": part}).verdict == "holds"


def test_what_cannot_be_tested_is_said_so_and_older_results_are_marked() -> None:
    untestable = claim(file="", first=(), second=(), untestable="needs a GPU")
    findings = judge_all([untestable, claim()], {"x/t": result(one=GOOD)}, {"x/t": "then"})
    assert [found.verdict for found in findings] == ["not testable at this scale", "holds"]
    assert [found.older for found in findings] == [False, True]
    assert {found.verdict for found in findings} <= VERDICTS.keys()


def write_run(folder: Path, name: str, accuracy: dict[str, list[list[float]]]) -> None:
    """A run directory: per label, per seed, the accuracy of each round."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'name = "{name}"\n')
    rows = [
        {"method": label, "label": label, "seed": seed, "round": at, "accuracy": value, "bytes_up": 1000}
        for label, seeds in accuracy.items()
        for seed, rounds in enumerate(seeds)
        for at, value in enumerate(rounds, start=1)
    ]
    (folder / "ledger.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    scores = {"fedavg": [[0.5], [0.6]], "fedlpa": [[0.8], [0.823456789]]}
    write_run(tmp_path / "runs" / "table5-mnist", "table5-mnist-classes-2-niid-bench", scores)
    write_run(tmp_path / "runs" / "table5-fashion", "table5-fashion-mnist", {"fedavg": [[0.4], [0.3]]})
    return tmp_path / "runs"


def test_a_sweep_becomes_one_result_by_cell_label_score_and_seed(sweep: Path, tmp_path: Path) -> None:
    result = collect_result("fedlpa/table5", "cpu", "abc", sweep)
    assert set(result.cells) == {"mnist-classes-2", "fashion-mnist"}
    assert result.cells["mnist-classes-2"]["fedlpa"]["accuracy"] == {0: 0.8, 1: 0.8235}
    path = write_result(result, tmp_path / "results")
    assert path == tmp_path / "results" / "fedlpa" / "table5.cpu.json"
    assert read_result(path) == result
    assert read_results(tmp_path / "results") == {"fedlpa/table5": result}
    assert read_results(tmp_path / "results", "paper") == {}


def test_what_was_not_finished_is_named_and_not_counted(sweep: Path, tmp_path: Path) -> None:
    partly = {"table5-fashion-mnist": [], "table5-mnist-classes-2-niid-bench": [("fedlpa", 0)]}
    result = collect_result("fedlpa/table5", "cpu", "abc", sweep, partly)
    assert result.cells == {"mnist-classes-2": {"fedlpa": {"accuracy": {0: 0.8}, "bytes_up": {0: 1000.0}}}}
    assert result.unfinished == ("fashion-mnist", "mnist-classes-2")
    assert read_result(write_result(result, tmp_path / "results")) == result
    assert "Not finished: fashion mnist, mnist classes 2." in stored_table(result)


def test_costs_add_up_and_curves_leave_their_first_and_last_rounds(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "rounds", {"fedavg": [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]})
    scores = collect_result("x/rounds", "cpu", "", tmp_path / "run").cells["rounds"]["fedavg"]
    assert scores["bytes_up"] == {0: 6000.0}
    assert scores["first_round"] == {0: 0.1}
    assert scores["last_rounds"] == {0: pytest.approx(0.4)}
    assert scores["accuracy"] == {0: 0.6}


def test_a_damaged_result_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "t.cpu.json"
    for text in (
        "{",
        "[]",
        '{"name": "t"}',
        '{"name":"t","scale":"cpu","digest":"","cells":{"a":{"b":{"accuracy":[1]}}}}',
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no stored result .* fedfuse reproduce --store"):
            read_result(path)


def test_a_digest_follows_settings_and_not_words(tmp_path: Path) -> None:
    file = tmp_path / "a.cpu.toml"
    file.write_text("# one\nrounds = 1\n\n# two\nseeds = [0]\n")
    first = digest_of(file)
    file.write_text("# other words\nrounds = 1\nseeds = [0]\n")
    assert digest_of(file) == first
    file.write_text("rounds = 2\nseeds = [0]\n")
    assert digest_of(file) != first


def test_a_table_has_methods_down_and_cells_across(sweep: Path) -> None:
    lines = stored_table(collect_result("fedlpa/table5", "cpu", "", sweep)).splitlines()
    assert lines[0] == "| accuracy, % | fashion mnist | mnist classes 2 |"
    assert lines[2] == "| fedavg | **35.0 ± 7.1** | 55.0 ± 7.1 |"
    assert lines[3] == "| fedlpa | – | **81.2 ± 1.7** |"
    assert lines[-1] == "Seeds 0, 1; `fedfuse reproduce fedlpa/table5 --scale cpu`."


def test_costs_are_told_in_units_a_reader_knows() -> None:
    costs = {"bytes_up": {0: 1.79e6}, "flops": {0: 8.449e10}, "server_seconds": {0: 1.5}}
    result = StoredResult("x/t", "cpu", "", {"t": {"fedavg": costs}})
    told = [stored_table(result, score).splitlines() for score in costs]
    assert [lines[0].split("|")[1].strip() for lines in told] == ["sent up, MB", "clients' work, GFLOPs", "server, s"]
    assert [lines[2] for lines in told] == ["| fedavg | **1.79** |", "| fedavg | **84.5** |", "| fedavg | **1.50** |"]


def test_marked_tables_are_written_anew_and_nothing_else(sweep: Path) -> None:
    results = {"fedlpa/table5": collect_result("fedlpa/table5", "cpu", "", sweep)}
    text = "before\n<!-- stored fedlpa/table5 -->\nold\n<!-- /stored -->\nafter\n"
    new = fill_tables(text, results)
    assert new.startswith("before\n<!-- stored fedlpa/table5 -->\n| accuracy, % |")
    assert new.endswith("<!-- /stored -->\nafter\n")
    assert "old" not in new
    assert fill_tables(new, results) == new
    assert "`swa/table1` was never run." in fill_tables("<!-- stored swa/table1 -->\n\n<!-- /stored -->", results)
    assert "| sent up, MB |" in fill_tables(text.replace("table5 ", "table5 bytes_up "), results)
    with pytest.raises(ConfigError, match="no stored score 'acuracy'"):
        fill_tables(text.replace("table5 ", "table5 acuracy "), results)


def test_the_document_and_the_page_tell_every_claim(sweep: Path) -> None:
    results = {"fedlpa/table5": collect_result("fedlpa/table5", "cpu", "", sweep)}
    about = {"file": "fedlpa/table5", "first": ("fedlpa",), "second": ("fedavg",), "methods": ("fedlpa",)}
    claims = [
        Claim(
            id="a", paper="FedLPA", place="Table 5", says="FedLPA <is> above | FedAvg.", published="+20 points", **about
        ),  # type: ignore[arg-type]
        Claim(
            id="b", paper="SWA", place="Table IV", says="SWA is best.", untestable="it wants a GPU", methods=("swa",)
        ),
    ]
    findings = [judge_claim(claim, results) for claim in claims]
    document, page = reproduction_document(findings), reproduction_page(findings)
    assert "| FedLPA <is> above \\| FedAvg. | Table 5 | +20 points | **holds in part** | +26.2" in document
    assert "- *SWA is best.* It wants a GPU." in document
    assert "`fedfuse reproduce fedlpa/table5 --scale cpu`" in document
    assert "FedLPA &lt;is&gt; above | FedAvg." in page
    assert "not testable at this scale" in page
    assert "http" not in page
    assert len(method_verdicts("fedlpa", findings)) == 3
    assert method_verdicts("fedavg", findings) == []
