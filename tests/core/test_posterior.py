"""The dense form of a posterior against its definition."""

from __future__ import annotations

import torch
from torch import nn

from fedfuse.core.params import Layout
from fedfuse.core.posterior import Diag, Kron, Posterior


def test_kronecker_precision_is_that_of_the_quadratic_form() -> None:
    """⟨V, B V A⟩ for V = [W | b] equals vᵀ (B ⊗ A) v on its row-major coordinates."""
    module, draw = nn.Linear(3, 2), torch.Generator().manual_seed(0)
    root_a, root_b = (torch.randn(n, n, generator=draw, dtype=torch.float64) for n in (4, 2))
    a, b = root_a @ root_a.T, root_b @ root_b.T
    state = {n: t.detach() for n, t in module.state_dict().items()}
    layout = Layout.of(module)
    mean, precision = Posterior(state, Kron({layout.layers[0].name: (a, b)})).dense(layout)
    v = torch.randn(2, 4, generator=draw, dtype=torch.float64)
    assert torch.allclose(v.flatten() @ precision @ v.flatten(), (v * (b @ v @ a)).sum())
    assert mean.equal(torch.cat([state["weight"], state["bias"][:, None]], 1).double().flatten())


def test_diagonal_precision_is_one_over_the_variance_in_layer_order() -> None:
    state = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "scale": torch.ones(1)}
    variance = {"weight": torch.tensor([[1.0, 2.0], [4.0, 5.0]]), "bias": torch.tensor([10.0, 20.0])}
    mean, precision = Posterior(state, Diag(variance)).dense()
    expected = torch.tensor([1.0, 0.5, 0.1, 0.25, 0.2, 0.05, 1.0], dtype=torch.float64)
    assert torch.allclose(precision, expected.diag())
    assert len(mean) == 7


def test_flat_posteriors_weigh_every_direction_alike_and_leave_counters_out() -> None:
    state = {"w": torch.ones(2, 1), "n": torch.tensor(3)}
    mean, precision = Posterior(state).dense()
    assert mean.tolist() == [1.0, 1.0]
    assert precision.equal(torch.eye(2, dtype=torch.float64))
