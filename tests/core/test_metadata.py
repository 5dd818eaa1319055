"""What files say of themselves: names of classes, sites, and headers read with suspicion."""

from __future__ import annotations

from typing import Any

import pytest

from fedfuse.core.inputs import ArrayForm, PictureForm
from fedfuse.core.metadata import About, Contribution, check_class_names, names_text, versions
from fedfuse.errors import ConfigError


def test_what_is_told_comes_back() -> None:
    about = About(
        client="north",
        class_names=("ill", "well"),
        inputs=PictureForm(height=4, width=6, channels=1, mean=(0.5,), std=(0.1,)),
        sites=(Contribution(client="a", num_examples=3.0),),
        versions=versions(),
    )
    assert About.of({"kind": "model", **about.to_json()}) == about
    assert "method" not in about.to_json(), "what is not known is not told"


def test_old_headers_tell_a_shape() -> None:
    assert About.of({"inputs": [1, 8, 8]}).inputs == ArrayForm(shape=(1, 8, 8))
    assert About.of({"inputs": []}).inputs is None


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"class_names": ["a", "a"]}, "'a' stands there twice"),
        ({"class_names": ["a\nb"]}, "no name of a class"),
        ({"class_names": "ab"}, "class_names is 'ab'"),
        ({"class_names": [3]}, "class_names.0 is 3"),
        ({"inputs": {"kind": "pictures", "height": 0, "width": 1}}, "height"),
        ({"inputs": {"kind": "sounds"}}, "inputs"),
        ({"sites": [{"client": "a", "num_examples": -1}]}, "num_examples"),
        ({"steps": -1}, "steps"),
    ],
)
def test_a_header_that_cannot_be_is_one_sentence(header: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        About.of(header)


def test_names_are_words() -> None:
    check_class_names(["0", "mild dysplasia", "naïve"])
    with pytest.raises(ConfigError, match="blanks at the ends"):
        check_class_names([" a"])
    assert names_text([str(k) for k in range(40)]).endswith("11, … (40 in all)")
