"""Random features in place of a network: which kind, how many, and that a run and files draw the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedfuse
from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.methods.ridge import RandomFeatures


def single(spec: Spec) -> Single:
    return Single.of(spec.build(), spec)


def test_pictures_get_convolutions_and_tables_cosines() -> None:
    pictures = RandomFeatures(100)(single(Spec("lenet", {"channels": 3, "size": 32})), 7, seed=5)
    assert pictures.spec == Spec(
        "random_convolution", {"channels": 3, "size": 32, "filters": 6, "classes": 7, "seed": 5}
    )
    table = RandomFeatures(100)(single(Spec("mlp", {"inputs": 13, "classes": 2})), 0, seed=5)
    assert table.spec == Spec("random_fourier", {"inputs": 13, "features": 100, "classes": 2, "seed": 5})
    assert RandomFeatures(3)(table, 2, seed=9) is table
    with pytest.raises(ConfigError, match="does not say what an input looks like"):
        RandomFeatures()(single(Spec.of(nn.Linear(3, 2))), 2, seed=0)


def test_files_need_no_start_where_it_follows_from_the_seed() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = Rows(torch.rand(30, 1, 8, 8, generator=draw), torch.arange(30) % 3)
    spec, recipe = Spec("lenet", {"size": 8, "classes": 3}), fedfuse.recipe("ridge", features=32)
    sites = [
        fedfuse.local_update(spec, rows.take(part), recipe, client=c)
        for c, part in zip("ab", torch.arange(30).split(15), strict=True)
    ]
    model = fedfuse.fuse(sites, recipe)
    assert model.module()(rows.x).shape == (30, 3)
    other = fedfuse.local_update(spec, rows, recipe, client="c", seed=1)
    assert [r["client"] for r in fedfuse.fuse([*sites, other], recipe).refused] == ["c"]
    refit = fedfuse.recipe("refit")
    with pytest.raises(RecipeError, match="needs the weights the sites started from"):
        fedfuse.fuse([fedfuse.local_update(spec, rows, refit)], refit)
