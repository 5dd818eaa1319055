"""Named streams: reproducible, distinct, and out of the global generator's way."""

from __future__ import annotations

from itertools import combinations

import torch

from fedfuse.core.rng import seed_for, seeded, stream


def test_every_word_of_the_purpose_matters() -> None:
    purposes = [(0,), (1,), (0, "a"), (0, "a", 1), (0, "a", "1"), (0, "a1"), (0, 1, "a"), (0, "a", 11), (0, "a", 1, 1)]
    seeds = [seed_for(*p) for p in purposes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)


def test_streams_do_not_share_numbers() -> None:
    draws = [torch.rand(64, generator=stream(0, "round", r, c)) for r in range(4) for c in ("a", "b")]
    assert all(not torch.isin(x, y).any() for x, y in combinations(draws, 2))


def test_seeded_restores_the_global_generator_even_after_an_error() -> None:
    before = torch.random.get_rng_state()
    try:
        with seeded(3, "dropout"):
            first = torch.rand(2)
            raise KeyError
    except KeyError:
        pass
    assert torch.random.get_rng_state().equal(before)
    with seeded(3, "dropout"):
        assert torch.rand(2).equal(first)
