from __future__ import annotations

from fedfuse.report.page import LIMIT, fact_text, flatten, method_facts, tables


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
