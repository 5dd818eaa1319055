"""Which units of several clients are noisy copies of one: a Beta–Bernoulli process, fitted by assignments.

Every client's units are drawn around atoms that all clients share, each atom used at most once by a client. How many
atoms there are, and who uses which, follows a Beta–Bernoulli process; its most probable value is sought client by
client, each step an exact assignment (Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks,
ICML 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedfuse.errors import ConfigError
from fedfuse.linalg.assign import match

Odds: TypeAlias = Literal["exact", "released"]

_MOST_POPULAR = 10  # beyond so many users the released code counts an atom no more popular


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """One client's units.

    Attributes:
        values: a unit's coordinates in each row, float64.
        precision: how sharply each coordinate is known, or one number for all of them.
    """

    values: Tensor
    precision: Tensor

    @property
    def weighted_values(self) -> Tensor:
        """Values times precisions: what the units add to their atoms."""
        return self.values * self.precision


@dataclass(frozen=True, slots=True, eq=False)
class AtomPrior:
    """The prior of an atom: N(mean, 1/precision), and how many atoms there are.

    Attributes:
        mean: μ₀ by coordinate.
        precision: 1/σ₀² by coordinate, or one number if the clients' precisions are one number each.
        gamma: γ₀, the mass of the process: more makes more atoms.
        odds: weigh an atom's popularity as the derivation says, or half as much and up to ten users, as the
            released code does.
    """

    mean: Tensor
    precision: Tensor
    gamma: float = 1.0
    odds: Odds = "exact"

    def popularity(self, users: Tensor, clients: int) -> Tensor:
        """2 log(m/(J − m)): how much likelier than not one more client uses an atom m others use."""
        # doubled, as is the novelty below, because gains are twice log-likelihoods: the Gaussian's ½ is left out there
        if self.odds == "released":
            return torch.logit(users.double().clamp(max=_MOST_POPULAR) / clients)
        return 2 * torch.logit(users.double() / clients)

    def novelty(self, count: int, clients: int) -> Tensor:
        """2 log(γ₀/J) − 2 log t: how likely a t-th new atom is."""
        t = torch.arange(1, count + 1, dtype=torch.float64, device=self.mean.device)
        return 2 * math.log(self.gamma / clients) - 2 * t.log()


@dataclass(frozen=True, slots=True, eq=False)
class SharedAtoms:
    """The atoms that clients share.

    Attributes:
        assignment: for every client the atom of each of its units.
        sums: per atom the precision-weighted sum of its units.
        precision: per atom the sum of their precisions.
        users: how many clients use each atom.
        sweeps: rounds over the clients until nothing changed, or until there were enough.
    """

    assignment: tuple[Tensor, ...]
    sums: Tensor
    precision: Tensor
    users: Tensor
    sweeps: int

    def __len__(self) -> int:
        return len(self.users)

    def mode(self, belief: AtomPrior) -> Tensor:
        """The most probable atoms: (μ₀/σ₀² + Σ v/σ²) / (1/σ₀² + Σ 1/σ²), so the prior shrinks what few use."""
        return (belief.mean * belief.precision + self.sums) / (belief.precision + self.precision)

    def mean(self) -> Tensor:
        """The plain weighted means, zero for a coordinate no client knows."""
        return torch.where(self.precision > 0, self.sums / self.precision.clamp(min=torch.finfo().tiny), 0.0)


def gains(units: Units, sums: Tensor, precision: Tensor) -> Tensor:
    """Twice the log-likelihood that each unit (rows) adds to each atom (columns), by a constant per unit too much.

    Σ_d (v_ld s_d + G_id)² / (s_d + S_id) − Σ_d G_id² / S_id, for atoms with sums G and precisions S, prior included.

    Example:
        >>> one = Units(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0]))
        >>> gains(one, torch.tensor([[4.0]]), torch.tensor([[2.0]]))
        tensor([[0.3333],
                [8.3333]])
    """
    v, after = units.weighted_values, units.precision + precision
    squares = v.square() if len(units.precision) > 1 else v.square().sum(1, keepdim=True)
    without_units = (sums.square() / after).sum(1) - (sums.square() / precision).sum(1)
    return squares @ (1 / after).T + 2 * v @ (sums / after).T + without_units


def share_atoms(
    clients: Sequence[Units], belief: AtomPrior, *, sweeps: int = 5, draw: torch.Generator | None = None
) -> SharedAtoms:
    """Find the atoms of several clients' units: the mode of the Beta–Bernoulli process, by coordinate ascent.

    Clients come in decreasing size; each one's units are assigned to the atoms there are, or to new ones, with the
    largest sum of gains. Then, in sweeps of random order, each client is taken out, atoms left empty vanish, and it
    is assigned again.

    Args:
        clients: each one's units, with the same coordinates.
        belief: what is believed of atoms beforehand.
        sweeps: how often every client is assigned again, at most; it ends when a sweep changes nothing.
        draw: the order of the sweeps; by default a generator with seed 0.

    Example:
        >>> a = torch.eye(3, dtype=torch.float64) * 9
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> found = share_atoms([Units(a, one), Units(a[[2, 0]], one)], AtomPrior(torch.zeros(3).double(), one))
        >>> [p.tolist() for p in found.assignment], found.users.tolist()
        ([[0, 1, 2], [2, 0]], [2, 1, 2])
    """
    if not clients or len({u.values.shape[1] for u in clients}) > 1:
        widths = sorted({u.values.shape[1] for u in clients})
        raise ConfigError(f"share_atoms: got units of {widths} coordinates, expected one number for all clients")
    draw = torch.Generator().manual_seed(0) if draw is None else draw
    table = _Table.empty(clients, belief)
    for atoms in sorted(range(len(clients)), key=lambda j: -len(clients[j].values)):
        table.assign(atoms)
    assignment, changed, done = _by_first_use(table.assignment), True, 0
    while changed and done < sweeps:
        for atoms in torch.randperm(len(clients), generator=draw).tolist():
            table.remove(atoms)
            table.assign(atoms)
        before, assignment, done = assignment, _by_first_use(table.assignment), done + 1
        changed = not all(a.equal(b) for a, b in zip(before, assignment, strict=True))
    return atoms_of_assignment(clients, assignment, sweeps=done)


def atoms_of_assignment(clients: Sequence[Units], assignment: Sequence[Tensor], *, sweeps: int = 0) -> SharedAtoms:
    """The atoms of a known assignment.

    Example:
        >>> two = Units(torch.tensor([[1.0], [5.0]]), torch.ones(1))
        >>> atoms_of_assignment([two, two], [torch.tensor([0, 1]), torch.tensor([1, 2])]).mean().flatten()
        tensor([1., 3., 5.])
    """
    count = 1 + max((int(p.max()) for p in assignment if len(p)), default=-1)
    first = clients[0]
    sums = first.values.new_zeros(count, first.values.shape[1])
    precision, users = sums.new_zeros(count, len(first.precision)), sums.new_zeros(count)
    for units, atoms in zip(clients, assignment, strict=True):
        sums[atoms] += units.weighted_values
        precision[atoms] += units.precision
        users[atoms] += 1
    return SharedAtoms(tuple(assignment), sums, precision, users.long(), sweeps)


@dataclass(slots=True, eq=False)
class _Table:
    """The atoms at some moment of the search, prior included: G, S and m of the formulas."""

    clients: Sequence[Units]
    belief: AtomPrior
    assignment: list[Tensor]
    sums: Tensor
    precision: Tensor
    users: Tensor

    @classmethod
    def empty(cls, clients: Sequence[Units], belief: AtomPrior) -> _Table:
        none = torch.zeros(0, dtype=torch.int64)
        sums = belief.mean.new_zeros(0, len(belief.mean))
        precision = sums.new_zeros(0, len(belief.precision))
        return cls(clients, belief, [none] * len(clients), sums, precision, sums.new_zeros(0))

    def assign(self, client: int) -> None:
        """Give every unit of a client the atom, or a new one, by the largest sum of gains."""
        units, there = self.clients[client], len(self.users)
        atoms = match(self._gains(units), maximize=True).cols
        new = atoms >= there
        atoms[new] = there + torch.arange(int(new.sum()), device=atoms.device)  # new atoms are all alike
        self._grow(int(new.sum()))
        self._add(client, atoms, 1)
        self.assignment[client] = atoms

    def remove(self, client: int) -> None:
        """Take a client's units out; atoms without users vanish."""
        self._add(client, self.assignment[client], -1)
        self.assignment[client] = self.assignment[client][:0]
        used = self.users > 0
        renumbered = used.cumsum(0) - 1
        self.assignment = [renumbered[p] for p in self.assignment]
        self.sums, self.precision, self.users = self.sums[used], self.precision[used], self.users[used]

    def _gains(self, units: Units) -> Tensor:
        belief, count = self.belief, len(self.clients)
        prior = (belief.mean * belief.precision)[None], belief.precision[None]
        old = gains(units, self.sums, self.precision) + belief.popularity(self.users, count)
        new = gains(units, *prior) + belief.novelty(len(units.values), count)
        return torch.cat([old, new], 1)

    def _grow(self, count: int) -> None:
        belief = self.belief
        self.sums = torch.cat([self.sums, (belief.mean * belief.precision).expand(count, -1)])
        self.precision = torch.cat([self.precision, belief.precision.expand(count, -1)])
        self.users = torch.cat([self.users, self.users.new_zeros(count)])

    def _add(self, client: int, atoms: Tensor, sign: int) -> None:
        units = self.clients[client]
        self.sums[atoms] += sign * units.weighted_values
        self.precision[atoms] += sign * units.precision
        self.users[atoms] += sign


def _by_first_use(assignment: Sequence[Tensor]) -> list[Tensor]:
    """The same assignment with atoms numbered as they come up, client by client and unit by unit."""
    number: dict[int, int] = {}
    for atom in torch.cat(list(assignment)).tolist():
        number.setdefault(atom, len(number))
    return [torch.tensor([number[a] for a in p.tolist()], dtype=torch.int64, device=p.device) for p in assignment]
