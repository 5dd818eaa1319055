"""Compiled sums of powers against exact ones, and SWA by either."""

from fractions import Fraction

import pytest
import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods import swa
from fedfuse.methods.swa import NonGaussianMean

pytest.importorskip("numba")


@pytest.mark.parametrize("count", [1, 63, 64, 1000])
@pytest.mark.parametrize("begin", [0.0, 0.375])
def test_sums_of_powers_are_those_of_fractions(count: int, begin: float) -> None:
    from fedfuse.kernels.sums.powers import power_sums

    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count))
    off = [Fraction(x) - Fraction(begin) for x in numbers.tolist()]
    expected = [float(sum(x**p for x in off)) for p in (1, 2, 3, 4)]
    assert power_sums(numbers.numpy(), begin).tolist() == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_swa_is_the_same_by_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, draw = Spec("lenet"), torch.Generator().manual_seed(0)
    start = Single.of(spec.build(), spec)

    def update(k: int) -> ClientUpdate:
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=draw).exp() for n, t in start.posterior.mean.items()}
        return ClientUpdate(f"c{k}", Posterior(moved), 1.0 + k, 1, spec)

    cohort, state = Cohort.of([update(k) for k in range(6)]), ServerState(0, start)
    by_torch = NonGaussianMean()(cohort, state, Bench())
    monkeypatch.setattr(swa, "_LONG", 1)
    compiled = NonGaussianMean()(cohort, state, Bench())
    for name, expected in by_torch.single.posterior.mean.items():
        assert torch.allclose(compiled.single.posterior.mean[name], expected, rtol=1e-6, atol=1e-8)
    for layer, scores in by_torch.facts["gaussianity"].items():
        assert compiled.facts["gaussianity"][layer] == pytest.approx(scores, rel=1e-4)
