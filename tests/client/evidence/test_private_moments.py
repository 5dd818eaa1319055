import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fedfuse.client.class_sums import Moments, PrivateMoments, add_noise, collect_sums
from fedfuse.core.messages import Envelope
from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import RecipeError
from fedfuse.linalg.psd import pack
from fedfuse.linalg.ridge import Sums
from fedfuse.nets.head import moment_notes, sums_in
from fedfuse.server.admission.admit import admit_all
from fedfuse.training.round import client_round

SPEC = Spec("mlp", {"inputs": 4, "hidden": [], "classes": 3})


def rows(count: int = 60, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=draw)
    return Rows(torch.randn(count, 4, generator=draw) + 2 * nn.functional.one_hot(y, 4), y)


def released(sums: Sums, clip: float) -> Tensor:
    """What is told of some rows, in units of the clip and without noise: triangle, table and counts."""
    inner, table = sums.gram[:-1, :-1] / clip**2, sums.cross[:-1] / clip
    return torch.cat([pack(inner), table.flatten(), sums.cross[-1]])


def sums_of(x: Tensor, y: Tensor, clip: float) -> Sums:
    return collect_sums(nn.Linear(4, 3), "", Rows(x, y), 3, Moments(clip=clip))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.floats(0.1, 10.0), st.booleans())
def test_one_row_replaced_moves_the_release_no_further_than_its_sensitivity(seed: int, clip: float, same: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    own = rows(5, seed)
    x, y = own.x.clone(), own.y.clone()
    x[2] = 5 * torch.randn(4, generator=draw) * clip
    y[2] = own.y[2] if same else (own.y[2] + 1) % 3
    moved = float((released(sums_of(own.x, own.y, clip), clip) - released(sums_of(x, y, clip), clip)).norm())
    assert moved <= PrivateMoments(1.0, counts="public" if same else "noised").sensitivity + 1e-5


def test_the_sensitivity_cannot_be_smaller() -> None:
    """Two rows at right angles and of other classes, as long as rows may be: only the triangle saves a little."""
    first, second = torch.eye(4)[:1], torch.eye(4)[1:2]
    one, other = (released(sums_of(x, torch.tensor([c]), 1.0), 1.0) for x, c in ((first, 0), (second, 1)))
    assert float((one - other).norm()) == pytest.approx(math.sqrt(6))


def test_noise_has_the_distribution_it_claims() -> None:
    exact = Sums.of(torch.cat([rows().x / 10, torch.ones(60, 1)], 1), nn.functional.one_hot(rows().y, 3))
    sigma, clip = 2.5, 3.0
    draw = torch.Generator().manual_seed(1)
    gaps: dict[str, list[Tensor]] = {"triangle": [], "table": []}
    for _ in range(300):
        noised = add_noise(exact, sigma, clip, "noised", draw)
        assert noised.gram.equal(noised.gram.mT)
        gaps["triangle"].append(pack(noised.gram - exact.gram)[[0, 1, 2, 3, 5, 6, 7, 9, 10, 12]] / (sigma * clip**2))
        gaps["table"].append((noised.cross - exact.cross)[:-1].flatten() / (sigma * clip))
    for found in gaps.values():
        drawn = torch.stack(found)
        assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-3
        correlation = torch.corrcoef(drawn.mT) - torch.eye(drawn.shape[1])
        assert float(correlation.abs().max()) < 0.3


def test_what_follows_from_the_release_is_told_and_nothing_else() -> None:
    """The constant's column is the table's sum; counts are counts again; the number of rows stands as it is."""
    exact = sums_of(rows().x, rows().y, 1.0)
    noised = add_noise(exact, 30.0, 1.0, "noised", torch.Generator().manual_seed(0))
    assert torch.allclose(noised.gram[:-1, -1], noised.cross[:-1].sum(1))
    assert noised.count == float(noised.gram[-1, -1]) == 60.0
    assert bool((noised.cross[-1] >= 0).all())
    assert float(noised.cross[-1].sum()) == pytest.approx(60.0)
    public = add_noise(exact, 30.0, 1.0, "public", torch.Generator().manual_seed(0))
    assert public.cross[-1].equal(exact.cross[-1])


def exchange(recipe_options: dict[str, object], count: int = 60, seed: int = 0) -> tuple[ServerState, bytes]:
    recipe = find_method("ridge").recipe(features="given", **recipe_options)
    torch.manual_seed(0)
    state = ServerState(0, Single.of(SPEC.build(), SPEC))
    brief = state.brief((), 3)
    payload = client_round(recipe.work(LocalSettings()), brief, "a", rows(count), seed=seed).payload
    admission = admit_all([Envelope("a", payload)], brief, recipe.evidence, ("a",), trains=False)
    assert not admission.refused
    return recipe.aggregate(admission.cohort, state, Bench(classes=3)), payload


def test_the_door_lets_noise_in_and_a_large_epsilon_changes_little() -> None:
    exact, _ = exchange({"penalty": 1e-3})
    private, _ = exchange({"penalty": 1e-3, "epsilon": 1e12, "clip": 10.0, "reproducible": True})
    a, b = (s.single.posterior.mean["classifier.weight"] for s in (exact, private))
    assert torch.allclose(a, b, atol=0.05)
    assert exchange({"epsilon": 1.0})[0].facts["penalty"] > 0


def test_noise_comes_from_the_operating_system_unless_a_simulation_asks_for_the_seed() -> None:
    secret = [exchange({"epsilon": 1.0})[1] for _ in range(2)]
    known = [exchange({"epsilon": 1.0, "reproducible": True})[1] for _ in range(2)]
    assert secret[0] != secret[1]
    assert known[0] == known[1]


def test_the_penalty_is_no_smaller_than_what_noise_looks_like() -> None:
    noise = PrivateMoments(1.0).sigma
    state, _ = exchange({"epsilon": 1.0, "penalty": 0.0, "reproducible": True})
    sums = sums_in(PrivateMoments(1.0, reproducible=True)(local()))
    assert state.facts["penalty"] * sums.scale == pytest.approx(2 * noise * math.sqrt(5), rel=1e-6)


def local():  # type: ignore[no-untyped-def]
    from fedfuse.training.round import _prepare_local

    torch.manual_seed(0)
    brief = ServerState(0, Single.of(SPEC.build(), SPEC)).brief((), 3)
    recipe = find_method("ridge").recipe(features="given", epsilon=1.0, reproducible=True)
    return _prepare_local(recipe.work(LocalSettings()), brief, "a", rows(), {}, 0)


def test_a_file_says_how_private_it_is() -> None:
    (words,) = find_method("ridge").recipe(epsilon=0.5, delta=1e-6).reveals
    assert "ε = 0.5, δ = 1e-06" in words
    assert "the number of rows, exactly" in words
    assert "rows of each class" in find_method("ridge").recipe(epsilon=0.5, counts="public").reveals[0]


def test_layers_are_not_refitted_half_privately() -> None:
    with pytest.raises(RecipeError, match="without noise"):
        find_method("refit").recipe(epsilon=1.0, layers=True)


@pytest.mark.parametrize("clip", [0.5, 3.0])
@pytest.mark.parametrize("count", [1, 60])
def test_sums_longer_than_any_clipped_rows_with_noise_are_refused(count: int, clip: float) -> None:
    """Noise hides that sums are not of rows, so a table times a million passed; how long it can be is known still."""
    told = PrivateMoments(1.0, clip=clip)
    for seed in range(20):
        exact = sums_of(rows(count, seed).x, rows(count, seed).y, clip)
        noised = add_noise(exact, told.sigma, clip, "noised", torch.Generator().manual_seed(seed))
        assert told.check(moment_notes(noised), count) is None
    far = 1e6 * clip
    table = replace(noised, cross=torch.cat([noised.cross[:-1] + far, noised.cross[-1:]]))
    gram = noised.gram.clone()
    gram[0, 0] += far * clip
    for lie, field in ((table, "moments/cross"), (replace(noised, gram=gram), "moments/gram")):
        flaw = told.check(moment_notes(lie), count)
        assert flaw is not None
        assert flaw.field == field
