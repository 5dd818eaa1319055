from __future__ import annotations

import pickle  # noqa: TID251 (our own values, on their way to our own workers)

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedfuse.data.schemes import Classes, Dirichlet, Iid, Labels, Quantity, Scheme, ServerRowsConfig, Shards, Shares

ADAPTER: TypeAdapter[Scheme] = TypeAdapter(Scheme)


@pytest.mark.parametrize(
    ("written", "scheme"),
    [
        ({"kind": "iid"}, Iid()),
        ({"kind": "shares", "shares": [0.6, 0.15, 0.15]}, Shares(shares=(0.6, 0.15, 0.15))),
        ({"kind": "dirichlet", "alpha": 0.1}, Dirichlet(alpha=0.1)),
        ({"kind": "classes", "per_client": 2, "compat": "niid-bench"}, Classes(per_client=2, compat="niid-bench")),
        ({"kind": "labels", "share": "copy"}, Labels(low=3, high=6, share="copy")),
        ({"kind": "shards"}, Shards(per_client=2)),
        ({"kind": "quantity", "sigma": 1}, Quantity(sigma=1.0)),
    ],
)
def test_kind_tells_schemes_apart_and_they_travel(written, scheme):
    read = ADAPTER.validate_python(written)
    assert read == scheme
    assert type(read) is type(scheme)
    assert pickle.loads(pickle.dumps(read)) == scheme
    assert ADAPTER.validate_python(scheme.model_dump()) == scheme


def test_a_scheme_fits_into_another_model():
    class Data(BaseModel):
        model_config = ConfigDict(extra="forbid")
        partition: Scheme

    assert Data.model_validate({"partition": {"kind": "shards"}}).partition == Shards()


def refusal(written: dict[str, object]) -> str:
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python(written)
    return caught.value.errors()[0]["msg"]


@pytest.mark.parametrize("alpha", [0, -1, -0.0])
def test_alpha_must_be_above_zero(alpha):
    message = refusal({"kind": "dirichlet", "alpha": alpha})
    assert message.startswith(f"it is {alpha:g}, expected a number above 0")
    assert "Value error" not in message


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"kind": "dirichlet", "alpha": float("nan")}, "finite"),
        ({"kind": "dirichlet", "alpha": float("inf")}, "finite"),
        ({"kind": "dirichlet", "alpha": 0.1, "min_rows": 0}, "it is 0, expected at least 1"),
        ({"kind": "dirichlet", "alpha": 0.1, "beta": 1}, "Extra inputs"),
        ({"kind": "dirichlet", "alpha": 0.1, "compat": "niid-bench", "balance": False}, "always balances"),
        ({"kind": "dirichlet", "alpha": 0.1, "compat": "fedlab"}, "niid-bench"),
        ({"kind": "shares", "shares": [0.6, 0.6]}, "the shares sum to 1.2, expected at most 1"),
        ({"kind": "shares", "shares": [0.6, -0.1]}, "it is -0.1"),
        ({"kind": "shares", "shares": []}, "at least 1"),
        ({"kind": "classes", "per_client": 0}, "it is 0, expected at least 1"),
        ({"kind": "labels", "low": 7, "high": 6}, "low is 7 and high is 6"),
        ({"kind": "quantity"}, "either alpha"),
        ({"kind": "quantity", "alpha": 1, "sigma": 1}, "either alpha"),
        ({"kind": "dirichlett", "alpha": 1}, "dirichlett"),
    ],
)
def test_impossible_schemes_are_refused_with_a_sentence(written, says):
    assert says in refusal(written)


def test_schemes_are_values():
    with pytest.raises(ValidationError, match="frozen"):
        Dirichlet(alpha=0.1).alpha = 0.2
    assert len({Iid(), Iid(), Shards()}) == 2


def test_ten_shares_of_a_tenth_are_a_whole():
    assert len(Shares(shares=(0.1,) * 10).shares) == 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either count or fraction"),
        ({"count": 5, "fraction": 0.1}, "either count or fraction"),
        ({"fraction": 1.0}, "fraction is 1"),
        ({"count": 0}, "it is 0"),
        ({"count": 5, "classes": [1, 1]}, "each class once"),
    ],
)
def test_impossible_server_rows_are_refused(options, says):
    with pytest.raises(ValidationError, match=says):
        ServerRowsConfig(**options)


def test_server_rows_are_counted_of_all_training_rows():
    assert ServerRowsConfig(fraction=0.1).row_count(40_000) == 4000
    assert ServerRowsConfig(count=7, classes=5).row_count(40_000) == 7
    assert ServerRowsConfig(count=7, classes=[1, 2]).classes == (1, 2)
