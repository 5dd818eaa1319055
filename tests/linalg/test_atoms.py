"""The Beta–Bernoulli process against its own log posterior, written out with torch's distributions."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from fedfuse.errors import ConfigError
from fedfuse.linalg.atoms import AtomPrior, SharedAtoms, Units, atoms_of_assignment, gains, share_atoms

D = 3


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(*shape: int, seed: int) -> Tensor:
    return normal(*shape, seed=seed).abs() + 0.3


def crowd(sizes: Sequence[int], seed: int, scale: float = 1.0) -> list[Units]:
    return [Units(scale * normal(n, D, seed=seed + k), positive(D, seed=50 + seed + k)) for k, n in enumerate(sizes)]


def belief(seed: int = 0, gamma: float = 1.0) -> AtomPrior:
    return AtomPrior(0.1 * normal(D, seed=seed), positive(D, seed=90 + seed), gamma)


@dataclass(frozen=True, slots=True)
class Oracle:
    """The log posterior of one client's assignment given everybody else's, term by term."""

    clients: Sequence[Units]
    prior: AtomPrior
    known: dict[tuple[tuple[int, int], ...], float] = field(default_factory=dict)

    def density(self, members: tuple[tuple[int, int], ...]) -> float:
        """log N(θ; μ₀) + Σ log N(v; θ) of an atom with these (client, unit) pairs, at the θ that makes it largest."""
        if members not in self.known:
            prior, told = self.prior, [(self.clients[k].values[row], self.clients[k].precision) for k, row in members]
            precision = prior.precision + sum(s for _, s in told)
            theta = (prior.mean * prior.precision + sum(v * s for v, s in told)) / precision
            terms = [Normal(prior.mean, prior.precision**-0.5).log_prob(theta)]
            terms += [Normal(theta, s**-0.5).log_prob(v) for v, s in told]
            self.known[members] = float(sum(t.sum() for t in terms))
        return self.known[members]

    def __call__(self, j: int, others: SharedAtoms, place: Sequence[int]) -> float:
        """P(values | atoms) P(B_j | B_-j), up to a constant.

        An atom that m others use is used with probability m/J, and the number of new ones is Poisson(γ/J). Atoms
        nobody uses stand at their prior's mode, so each atom counts by what it is above that.
        """
        rest, count, J = [k for k in range(len(self.clients)) if k != j], len(others), len(self.clients)
        members: list[list[tuple[int, int]]] = [[] for _ in range(count + len(place))]
        for k, places in [*zip(rest, others.assignment, strict=True), (j, torch.tensor(place))]:
            for row, atom in enumerate(places.tolist()):
                members[atom].append((k, row))
        values = sum(self.density(tuple(m)) - self.density(()) for m in members if m)
        shares = others.users.double() / J
        joined = [math.log(p if i in place else 1 - p) for i, p in enumerate(shares.tolist())]
        new = sum(p >= count for p in place)
        rate = self.prior.gamma / J
        return values + sum(joined) + new * math.log(rate) - rate - math.lgamma(new + 1)


def choices(units: int, atoms: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each unit an atom, no atom twice; atoms from `atoms` on are new and taken in order."""
    for places in itertools.permutations(range(atoms + units), units):
        new = [p for p in places if p >= atoms]
        if new == list(range(atoms, atoms + len(new))):
            yield places


def without(clients: Sequence[Units], found: SharedAtoms, j: int) -> SharedAtoms:
    """The atoms of everybody but client j, those it used alone gone."""
    places = [p for k, p in enumerate(found.assignment) if k != j]
    kept = torch.cat(places).unique()
    return atoms_of_assignment(
        [u for k, u in enumerate(clients) if k != j], [torch.searchsorted(kept, p) for p in places]
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [0.01, 1.0, 30.0])
def test_gains_are_twice_the_differences_of_the_log_posterior(seed: int, gamma: float) -> None:
    """Over every assignment of a client: sums of gains and log posteriors differ by one constant."""
    clients, prior = crowd([2, 3, 2], seed), belief(seed, gamma)
    others = share_atoms(clients[:2], prior)
    me, J, oracle = clients[2], 3, Oracle(clients, prior)
    old = gains(me, prior.mean * prior.precision + others.sums, prior.precision + others.precision)
    new = gains(me, (prior.mean * prior.precision)[None], prior.precision[None])
    table = torch.cat([old + prior.popularity(others.users, J), new + prior.novelty(2, J)], 1)
    apart = [
        oracle(2, others, place) - float(table[[0, 1], list(place)].sum()) / 2 for place in choices(2, len(others))
    ]
    assert len(apart) > 10
    assert max(apart) - min(apart) < 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_the_last_client_is_assigned_as_brute_force_would(seed: int) -> None:
    clients, prior = crowd([3, 3, 2], seed, scale=2.0), belief(seed)
    found = share_atoms(clients, prior, sweeps=0)
    others = without(clients, found, 2)
    oracle = Oracle(clients, prior)
    best = max(oracle(2, others, place) for place in choices(2, len(others)))
    assert oracle(2, others, as_choice(found, others, 2)) == pytest.approx(best)


def as_choice(found: SharedAtoms, others: SharedAtoms, j: int) -> tuple[int, ...]:
    """A client's places numbered as in the atoms of the others; its own atoms come after them."""
    kept = torch.cat([p for k, p in enumerate(found.assignment) if k != j]).unique().tolist()
    fresh = itertools.count(len(others))
    return tuple(kept.index(a) if a in kept else next(fresh) for a in found.assignment[j].tolist())


@pytest.mark.parametrize("seed", range(4))
def test_where_the_search_ends_no_client_would_rather_be_elsewhere(seed: int) -> None:
    clients, prior = crowd([3, 2, 2], seed, scale=1.5), belief(seed)
    oracle = Oracle(clients, prior)
    found = share_atoms(clients, prior, sweeps=50)
    assert found.sweeps < 50, "it ended because nothing changed"
    for j, units in enumerate(clients):
        others = without(clients, found, j)
        best = max(oracle(j, others, place) for place in choices(len(units.values), len(others)))
        assert oracle(j, others, as_choice(found, others, j)) == pytest.approx(best)


@pytest.mark.parametrize("copies", [1, 2, 7])
def test_permuted_copies_are_one_set_of_atoms_shrunk_by_the_prior(copies: int) -> None:
    """m/(m + σ²/σ₀²) of the original remains, around the prior's mean."""
    original, sigma, sigma0 = 4 * normal(6, 20, seed=1), 0.5, 2.0
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(k)) for k in range(copies)]
    precision = torch.full((20,), 1 / sigma, dtype=torch.float64)
    prior = AtomPrior(torch.full((20,), 0.1).double(), torch.full((20,), 1 / sigma0).double())
    found = share_atoms([Units(original[o], precision) for o in orders], prior)
    assert found.users.tolist() == [copies] * 6
    kept = copies / (copies + sigma / sigma0)
    for order, place in zip(orders, found.assignment, strict=True):
        assert torch.allclose(found.mode(prior)[place], 0.1 + kept * (original[order] - 0.1))
        assert torch.allclose(found.mean()[place], original[order])


def test_one_number_for_all_coordinates_is_as_many_equal_ones() -> None:
    values = [normal(5, 8, seed=k) for k in range(4)]
    wide = [Units(v, torch.full((8,), 2.0).double()) for v in values]
    short = [Units(v, torch.tensor([2.0]).double()) for v in values]
    mean = normal(8, seed=9)
    found = share_atoms(wide, AtomPrior(mean, torch.full((8,), 0.7).double()))
    same = share_atoms(short, AtomPrior(mean, torch.tensor([0.7]).double()))
    assert all(a.equal(b) for a, b in zip(found.assignment, same.assignment, strict=True))
    lean = AtomPrior(mean, torch.tensor([0.7]).double())
    assert torch.allclose(found.mode(AtomPrior(mean, torch.full((8,), 0.7).double())), same.mode(lean))


def test_atoms_nobody_uses_vanish() -> None:
    """Far apart at first sight, the first client's unit moves to the others' atom and leaves its own."""
    found = share_atoms(crowd([4, 4, 3, 2], 3), belief(3, gamma=5.0), sweeps=20)
    assert int(found.users.min()) >= 1
    assert found.users.sum() == 4 + 4 + 3 + 2
    assert torch.cat(found.assignment).unique().tolist() == list(range(len(found)))
    assert all(len(p.unique()) == len(p) for p in found.assignment), "no client uses an atom twice"


def test_more_mass_makes_more_atoms() -> None:
    clients = crowd([6] * 5, 11)
    widths = [len(share_atoms(clients, belief(gamma=g))) for g in (1e-6, 1.0, 1e3, 1e9)]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1] == 30


def test_popularity_as_derived_and_as_released() -> None:
    exact, released = (AtomPrior(torch.zeros(1), torch.ones(1), odds=o) for o in ("exact", "released"))  # type: ignore[arg-type]
    users = torch.tensor([1, 10, 15])
    assert torch.allclose(exact.popularity(users, 20), 2 * torch.tensor([1 / 19, 1.0, 3.0], dtype=torch.float64).log())
    assert torch.allclose(released.popularity(users, 20), torch.tensor([1 / 19, 1.0, 1.0], dtype=torch.float64).log())


def test_the_same_draw_gives_the_same_atoms_and_coordinates_must_agree() -> None:
    clients = crowd([5, 5, 5], 2)
    first, again = (share_atoms(clients, belief(), draw=torch.Generator().manual_seed(4)) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first.assignment, again.assignment, strict=True))
    with pytest.raises(ConfigError, match=r"got units of \[2, 3\] coordinates, expected one number"):
        share_atoms([*clients, Units(normal(2, 2, seed=0), torch.ones(1).double())], belief())
    with pytest.raises(ConfigError, match="share_atoms"):
        share_atoms([], belief())


def test_a_coordinate_nobody_knows_stays_at_the_prior() -> None:
    blind = torch.tensor([1.0, 0.0], dtype=torch.float64)
    prior = AtomPrior(torch.tensor([0.0, 0.1]).double(), torch.ones(2).double())
    found = share_atoms([Units(torch.tensor([[2.0, 50.0]]).double(), blind)] * 2, prior)
    assert torch.allclose(found.mode(prior), torch.tensor([[4 / 3, 0.1]]).double())
    assert found.mean().tolist() == [[2.0, 0.0]]
