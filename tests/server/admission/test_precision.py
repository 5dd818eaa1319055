"""Moves in units of precision: against leaving each client out of the fusion, and where none says how sure it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from builders import update_of
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Diag, Geometry, Kron, Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.linalg.factor import LowRank
from fedfuse.server.admission.influence import brought_moves
from fedfuse.server.guards import Krum

MODULE = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
SPEC = Spec.of(MODULE)
START = ServerState(0, Single.of(MODULE, SPEC))
CLIENTS = 7


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(size: int, seed: int) -> Tensor:
    root = drawn(size, 2 * size, seed=seed)
    return root @ root.mT / (2 * size)


def updates(*geometries: Geometry) -> list[ClientUpdate]:
    """Clients whose weights differ by a little, each with a geometry."""
    start = START.single.posterior.mean
    found = []
    for k, geometry in enumerate(geometries):
        mean = {
            n: t + 0.1 * drawn(*t.shape, seed=31 * k + i).to(t) if t.is_floating_point() else t
            for i, (n, t) in enumerate(start.items())
        }
        found.append(update_of(f"c{k}", mean, SPEC, geometry=geometry))
    return found


def kron(k: int, scale: float = 1.0) -> Kron:
    return Kron({"0": (scale * positive(4, k), scale * positive(2, 50 + k))})


def lengths(cohort: Cohort) -> Tensor:
    return torch.cat([moves for _, moves in brought_moves(cohort)], 1).norm(dim=1)


def test_without_evidence_it_is_the_distance_from_the_median() -> None:
    cohort = Cohort(tuple(updates(*[Kron({})] * CLIENTS)))
    plain = [cohort.stack(n).double() for n in cohort.names if cohort.stack(n).is_floating_point()]
    wanted = torch.cat([(t - t.median(0).values).flatten(1) for t in plain], 1)
    assert torch.allclose(torch.cat([moves for _, moves in brought_moves(cohort)], 1), wanted)


def test_clients_that_are_equally_sure_bring_their_moves() -> None:
    same, none = updates(*[kron(0)] * CLIENTS), updates(*[Kron({})] * CLIENTS)
    assert torch.allclose(lengths(Cohort(tuple(same))), lengths(Cohort(tuple(none))), rtol=1e-6)
    diag = Diag({"0.weight": torch.rand(2, 3) + 0.1})
    assert torch.allclose(lengths(Cohort(tuple(updates(*[diag] * CLIENTS)))), lengths(Cohort(tuple(none))), rtol=1e-5)


def test_it_ranks_clients_as_leaving_each_out_does() -> None:
    """The weighted mean without client k differs from the one with all by about what k brings over K."""
    fishers = [10.0 ** (k - 3) * torch.rand(2, 3, generator=torch.Generator().manual_seed(k)) for k in range(CLIENTS)]
    seen = [
        replace(u, posterior=replace(u.posterior, mean={"0.weight": u.posterior.mean["0.weight"]}))
        for u in updates(*(Diag({"0.weight": 1 / f}) for f in fishers))
    ]
    cohort = Cohort(tuple(seen))
    precision, stack = torch.stack(fishers).double(), cohort.stack("0.weight").double()
    precision = precision + precision.mean()

    def fused(who: list[int]) -> Tensor:
        return (precision[who] * stack[who]).sum(0) / precision[who].sum(0)

    everybody = list(range(CLIENTS))
    left = torch.stack([(fused(everybody) - fused([j for j in everybody if j != k])).norm() for k in everybody])
    assert lengths(cohort).argmax() == left.argmax() == CLIENTS - 1


@pytest.mark.parametrize("scale", [30.0, 1e6])
def test_krum_drops_who_claims_to_be_sure_where_it_moved(scale: float) -> None:
    """Honest factors may differ by decades; only together with a move do they make anybody stand far away."""
    honest = [kron(k, 10.0 ** ((k % 3) - 1)) for k in range(CLIENTS - 1)]
    cohort = Cohort(tuple(updates(*honest, kron(9, scale))))
    kept = Krum()(cohort, START).clients
    assert f"c{CLIENTS - 1}" not in kept


def test_who_is_very_sure_of_what_all_agree_on_is_kept() -> None:
    """Its factors are a million times the others', and it stands in their middle: it brings nothing of its own."""
    seen = updates(*(kron(k) for k in range(CLIENTS)))
    middle = {n: Cohort(tuple(seen)).stack(n).median(0).values for n in seen[0].posterior.mean}
    seen[2] = replace(seen[2], posterior=Posterior(middle, kron(2, 1e3)))
    assert "c2" in Krum()(Cohort(tuple(seen)), START).clients


def test_factors_of_several_forms_and_of_nothing_are_compared() -> None:
    flat = Kron({"0": (torch.zeros(4, 4), torch.zeros(2, 2))})
    assert torch.isfinite(lengths(Cohort(tuple(updates(*[flat] * CLIENTS))))).all()
    mixed = Kron({"0": (LowRank.diagonal(torch.ones(4)), torch.eye(2))})
    found = lengths(Cohort(tuple(updates(mixed, *(kron(k) for k in range(1, CLIENTS))))))
    assert torch.isfinite(found).all()
