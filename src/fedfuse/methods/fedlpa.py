"""Liu et al., FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation, NeurIPS 2024.

Around its trained weights M_k = [W | b] of a layer, client k believes in a Gaussian whose precision is the Fisher
information of its rows, A_k ⊗ B_k (eqs. 10 and 27). One round is

    client   A_k and B_k of every layer                                            `KroneckerFactors` in client/kfac.py
    server   Σ f_k B_k M A_k = Σ f_k B_k M_k A_k, solved for M, eqs. 7 and 11–14   `NaturalKron` in aggregate/natural.py

and a further round, with eta > 0, as the released code has it,

    client   loss + η Σ_layers max(0, ½ ⟨D, (B − B_k) D (A − A_k)⟩), D = M − M_global        `PosteriorPull`
             A_k, B_k are kept for the next round                                            `KeepFactors`
    server   A = Σ f_k A_k and B = Σ f_k B_k are published                                   `ShareFactors`

Two other papers solve the same equation less exactly on purpose: MaTS stops early (`EarlyStopped`), FedFisher takes the
step that is best on the server's rows (`BestStep`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedfuse.client.fisher import Fisher
from fedfuse.client.kfac import KroneckerFactors, Sharing
from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import Aggregator, Batch, Objective, ServerPart, TaskLoss
from fedfuse.core.state import Bench, Local, ServerState, entries_of, with_kind
from fedfuse.core.torch_utils import in_full
from fedfuse.errors import RecipeError
from fedfuse.linalg.cg import Solution, conjugate_gradient
from fedfuse.linalg.factor import BlockDiagonal, Factor, LowRank, dense
from fedfuse.linalg.kron import KronSum, Solver
from fedfuse.linalg.ridge import regression_mean
from fedfuse.linalg.subspace import times, written
from fedfuse.nets.kronecker import SIDES, Block, Which, blocks_of, read_factor
from fedfuse.server.aggregate.natural import (
    Balance,
    Equation,
    NaturalKron,
    Scale,
    ShareFactors,
    Shares,
    informed_blocks,
    split_solutions,
    with_the_rest_averaged,
)
from fedfuse.wire.codec import forms_of


@dataclass(frozen=True, slots=True)
class PosteriorPull:
    """FedLPA beyond the first round: base + η Σ_layers max(0, ½ ⟨D, (B − B_k) D (A − A_k)⟩), D = M − M_global.

    A, B are the cohort's mean factors, which the server publishes, and A_k, B_k the client's own from its last round:
    moving is dear along directions that matter to others and not to the client's own rows. A layer's term counts only
    while it is positive, for a difference of curvatures can be of either sign. Until both are known, which is in
    every client's first round, the loss is exactly the base's.

    Attributes:
        eta: η; the released code has 1.
        base: the loss without the pull.
    """

    eta: float
    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The base loss and the pull."""
        loss = self.base(local, batch)
        gaps = local.once("kron gaps", _gaps)
        if not gaps or self.eta == 0:
            return loss
        return loss + self.eta / 2 * torch.stack([gap.pull(local) for gap in gaps]).clamp(min=0).sum()


class _Gap(NamedTuple):
    """A − A_k and B − B_k of a layer, stacked over its groups, and the M_global it began at."""

    block: Block
    A: Tensor
    B: Tensor
    start: Tensor

    def pull(self, local: Local) -> Tensor:
        """⟨D, (B − B_k) D (A − A_k)⟩."""
        away = in_full(self.block.matrices(local.live)) - self.start
        inner = self.B @ away
        return (away * (inner * self.A[:, None] if self.block.has_diagonal_inputs else inner @ self.A)).sum()


def _gaps(local: Local) -> list[_Gap]:
    """The gap of every trained layer whose factors both sides know in its present size; a pruning changes sizes."""
    common, own = entries_of(local.brief.memory, "kron"), local.recall("kron")
    forms, found = forms_of(local.brief.params), list[_Gap]()
    for block in blocks_of(local.brief.spec):
        if not local.live.keys() >= set(block.tensors):
            continue
        sides = [[read_factor(factors, f"{block.name}/{side}") for factors in (common, own)] for side in SIDES]
        sized = zip(sides, block.sizes(forms), strict=True)
        known = [[f for f in pair if f is not None and _size(f) == size] for pair, size in sized]
        if all(len(pair) == 2 for pair in known):
            start = in_full(block.matrices(local.anchor))
            A, B = (_difference(*pair).to(start) for pair in known)
            found.append(_Gap(block, A, B, start))
    return found


def _size(factor: Factor) -> int:
    if isinstance(factor, BlockDiagonal):
        return sum(factor.sizes)
    return factor.rest.shape[-1] if isinstance(factor, LowRank) else factor.shape[-1]


def _difference(first: Factor, second: Factor) -> Tensor:
    """One factor less the other, stacked over groups, in float64; of diagonals, the diagonal."""
    if isinstance(first, LowRank) and isinstance(second, LowRank) and first.is_diagonal and second.is_diagonal:
        return (first.rest.double() - second.rest.double()).reshape(-1, first.rest.shape[-1])
    gap = dense(first).double() - dense(second).double()
    return gap.reshape(-1, *gap.shape[-2:])


@dataclass(frozen=True, slots=True)
class KeepFactors:
    """What `PosteriorPull` reads in the client's next round: the Kronecker factors it sent."""

    def __call__(self, local: Local, notes: Params) -> Params:  # noqa: ARG002 - the seam's signature
        """The factors as they were sent, without the damping the client chose."""
        return with_kind("kron", {n: t for n, t in entries_of(notes, "kron").items() if "/" in n})


Begin: TypeAlias = Literal["mean", "regmean", "tasks"]
Early: TypeAlias = Literal["early", "adam"]

_TASKS = 0.3  # how far along the sum of all tasks task arithmetic goes where nothing is tuned


def early_mean(
    Ms: Sequence[Tensor],
    As: Sequence[Factor],
    Bs: Sequence[Factor],
    shares: Tensor,
    *,
    start: Tensor,
    iterations: int,
    what: str,
) -> Solution:
    """Some iterations of plain conjugate gradients for Σ f_k B_k (M − M_k) A_k = 0, from a start (MaTS).

    Example:
        >>> I = torch.eye(2)
        >>> early_mean([I, 4 * I], [I, I], [I, 2 * I], torch.tensor([0.5, 0.5]), start=I, iterations=1, what="w").x
        tensor([[3., 0.],
                [0., 3.]], dtype=torch.float64)
    """
    operator, Z = _system(Ms, As, Bs, shares)
    return conjugate_gradient(operator, Z, x0=start, tol=1e-10, max_iters=iterations, strict=False, what=what)


def descend(
    Ms: Sequence[Tensor],
    As: Sequence[Factor],
    Bs: Sequence[Factor],
    shares: Tensor,
    *,
    start: Tensor,
    rate: float,
    every: int,
) -> Iterator[Tensor]:
    """Adam's steps down Σ f_k tr((M − M_k)ᵀ B_k (M − M_k) A_k) from a start (FedFisher): M after every `every`.

    Example:
        >>> I = torch.eye(1)
        >>> steps = descend([I, 3 * I], [I, I], [I, I], torch.tensor([0.5, 0.5]), start=I, rate=0.1, every=500)
        >>> round(float(next(steps)), 3)
        2.0
    """
    operator, Z = _system(Ms, As, Bs, shares)
    M = start.double().clone()
    optimizer = torch.optim.Adam([M], lr=rate)
    while True:
        for _ in range(every):
            M.grad = operator(M) - Z
            optimizer.step()
        yield M.clone()


def _system(Ms: Sequence[Tensor], As: Sequence[Factor], Bs: Sequence[Factor], shares: Tensor) -> tuple[KronSum, Tensor]:
    """The operator M ↦ Σ f_k B_k M A_k, and Σ f_k B_k M_k A_k."""
    inputs, outputs = [written(A) for A in As], [dense(B).double() for B in Bs]
    Z = torch.zeros_like(Ms[0], dtype=torch.float64)
    for f, M, A, B in zip(shares.tolist(), Ms, inputs, outputs, strict=True):
        Z.add_(times(B @ M.double(), A), alpha=f)
    return KronSum.of(inputs, outputs, shares), Z


def begin_at(begin: Begin, state: ServerState, block: Block, group: int, equation: Equation) -> Tensor:
    """Where a solve begins: Σ f_k M_k, the same equation with B = I, or M_0 + 0.3 Σ (M_k − M_0)."""
    shares = equation.shares.tolist()
    if begin == "regmean":
        return regression_mean(equation.layers, [written(A) for A in equation.inputs], shares)
    if begin == "mean":
        return sum(
            (f * M.double() for f, M in zip(shares, equation.layers, strict=True)),
            torch.zeros_like(equation.layers[0], dtype=torch.float64),
        )
    base = block.matrices(state.single.posterior.mean)[group].double()
    return base + _TASKS * torch.stack([M.double() - base for M in equation.layers]).sum(0)


@dataclass(frozen=True, slots=True)
class EarlyStopped(ServerPart):
    """MaTS: a few iterations of conjugate gradients from another merge (Tam et al., TMLR 2024).

    Attributes:
        of: the equation, with its damping and scales.
        begin: the "mean", "regmean", or "tasks" for task arithmetic.
        iterations: how many, for every layer.
    """

    of: NaturalKron = field(default_factory=NaturalKron)
    begin: Begin = "mean"
    iterations: int = 100
    layerwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = frozenset({"order", "scale", "pure", "dtype", "finite", "repeat"})

    @property
    def needs(self) -> frozenset[str]:
        """The factors, and for task arithmetic the common start."""
        return self.of.needs | ({"start"} if self.begin == "tasks" else set())

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Iterate layer by layer; the facts say how far each came."""
        mean: dict[str, Tensor] = {}
        solutions: dict[str, list[Solution]] = {}
        for block in informed_blocks(cohort):
            solutions[block.name] = []
            for group in range(block.groups):
                one = self.of.equation(cohort, block, group)
                start = begin_at(self.begin, state, block, group, one)
                found = early_mean(*one[:4], start=start, iterations=self.iterations, what=one.what)
                solutions[block.name].append(found)
            mean |= split_solutions(cohort, block, [s.x for s in solutions[block.name]])
        return with_the_rest_averaged(cohort, state, mean).noting(**self.of.facts(cohort, solutions))


@dataclass(frozen=True, slots=True)
class BestStep(ServerPart):
    """FedFisher: Adam from the mean, and of all steps the one with the least loss on the server's rows.

    Layers descend together, since they are judged together; the equations of all of them are held at once
    (Jhunjhunwala et al., AISTATS 2024).

    Attributes:
        of: the equation, with its damping and scales.
        begin: the "mean", "regmean", or "tasks" for task arithmetic.
        steps: how many at most.
        rate: Adam's.
        every: how many steps lie between two looks at the server's rows.
    """

    of: NaturalKron
    begin: Begin = "mean"
    steps: int = 2000
    rate: float = 0.01
    every: int = 100
    # it runs the network, which reads rows in the dtype it was built with and no other
    laws: ClassVar[frozenset[str]] = EarlyStopped.laws - {"dtype"}

    @property
    def needs(self) -> frozenset[str]:
        """The factors, rows to choose by and the network that answers to them."""
        return self.of.needs | {"server_rows", "network"} | ({"start"} if self.begin == "tasks" else set())

    def passes(self, clients: int, bench: Bench) -> float:  # noqa: ARG002 - the seam's signature
        """The server's rows at every look."""
        return (self.steps // self.every + 1) * float(len(bench.rows or ()))

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Descend and look, and keep the best."""
        best, losses = state, list[float]()
        for found in self._walk(cohort, state):
            losses.append(_loss(found, bench))
            best = found if losses[-1] <= min(losses) else best
        return best.noting(step=losses.index(min(losses)) * self.every, server_losses=losses)

    def _walk(self, cohort: Cohort, state: ServerState) -> Iterator[ServerState]:
        """The fused state at the beginning and at every look."""
        now: dict[Block, list[Tensor]] = {}
        walks: dict[Block, list[Iterator[Tensor]]] = {}
        for block in informed_blocks(cohort):
            known = [self.of.equation(cohort, block, group) for group in range(block.groups)]
            now[block] = [begin_at(self.begin, state, block, group, one) for group, one in enumerate(known)]
            walks[block] = [
                descend(*one[:4], start=M, rate=self.rate, every=self.every)
                for one, M in zip(known, now[block], strict=True)
            ]
        for look in range(self.steps // self.every + 1):
            if look:
                now = {block: [next(walk) for walk in mine] for block, mine in walks.items()}
            tensors = {n: t for block, found in now.items() for n, t in split_solutions(cohort, block, found).items()}
            yield with_the_rest_averaged(cohort, state, tensors)


@torch.no_grad()
def _loss(state: ServerState, bench: Bench) -> float:
    rows = bench.need_rows("FedFisher's choice of a step")
    total = sum(
        float(bench.task.loss(state.single.logits(x), y, "sum"))
        for x, y in zip(rows.x.split(1000), rows.y.split(1000), strict=True)
    )
    return total / len(rows)


@method("fedlpa", paper="arXiv:2310.00339", family="posterior")
def fedlpa(
    damping: PositiveFloat | Literal["evidence"] | None = None,
    scale: Scale | None = None,
    pi: Balance | None = None,
    solver: Solver | Early = "exact",
    fisher: Fisher = "empirical",
    shares: Shares = "examples",
    rank: PositiveInt | None = None,
    half: bool = False,
    sharing: Sharing = "expand",
    layers: Which = "all",
    centred: bool = False,
    min_rows: PositiveInt | None = None,
    eta: NonNegativeFloat = 0.0,
    tol: PositiveFloat = 1e-8,
    max_iters: PositiveInt | None = None,
    begin: Begin = "mean",
    block_width: PositiveInt | None = None,
) -> Recipe:
    """Fuse layer-wise Laplace posteriors: each client's weights count most where its own rows determine them.

    Clients send the Kronecker factors of their Fisher information; the server solves
    Σ f_k B_k M A_k = Σ f_k B_k M_k A_k for every layer M = [W | b] that has factors. Everything else is averaged.

    Args:
        damping: λ added to the factors, after they are scaled; or "evidence": each client sends the one its own rows
            prefer. By default 1e-1, and 1e-3 for factors as they are.
        scale: how factors are scaled before they are damped: root, client, layer, or none (as published). By default
            root, and none where clients choose the damping.
        pi: how λ is split between the factors: one, trace, frobenius, or evidence; by default trace, and evidence
            where the damping is.
        solver: exact (conjugate gradients), expectation (the closed approximation), gradient (the released steps),
            early (MaTS: conjugate gradients that stop early) or adam (FedFisher: the best step on the server's rows).
        fisher: empirical (the rows' own labels) or sampled (labels drawn from the network).
        shares: a client counts by its examples (as released), or uniform (as the paper's equations have it).
        rank: send so many leading eigenpairs of each factor and one number for the rest, instead of all of it.
        half: send eigenvectors in half precision.
        sharing: positions that share a weight are further examples (expand), or one example's (reduce).
        layers: all that have factors, or plain: linear layers and convolutions alone (as published).
        centred: take input factors of inputs less their mean, which is told otherwise.
        min_rows: a client with fewer rows sends no directions, only sizes; by default twice the batch it trains with.
        eta: from the second round on, the weight of the pull towards the common posterior.
        tol: relative residual the exact solver must reach.
        max_iters: its limit (1000), or the number of steps: 10000 of gradient, 100 of early, 2000 of adam.
        begin: where early and adam begin: mean, regmean (the same equation with B = I) or tasks (task arithmetic).
        block_width: of factors with more rows, send blocks of at most so many along their diagonals.
    """
    if half and rank is None:
        raise RecipeError("fedlpa: half stores eigenvectors in half precision and there are none; set rank, say to 8")
    if rank is not None and block_width is not None:
        raise RecipeError("fedlpa: rank and block_width are two ways to make factors small; set one of them")
    if begin != "mean" and solver not in ("early", "adam"):
        raise RecipeError(
            f"fedlpa: begin is {begin!r}, and the solver {solver!r} ends at the same weights wherever it begins; set "
            "solver to early or adam"
        )
    by_rows, pulled = damping == "evidence", eta > 0
    scaled: Scale = scale or ("none" if by_rows else "root")
    if damping is None:
        damping = 1e-3 if scaled == "none" else 1e-1
    balance = pi or ("evidence" if by_rows else "trace")
    equation = NaturalKron(damping, balance, scale=scaled, tol=tol, max_iters=max_iters, shares=shares)
    aggregate: Aggregator
    if solver == "early":
        aggregate = EarlyStopped(equation, begin, max_iters or 100)
    elif solver == "adam":
        aggregate = BestStep(equation, begin, max_iters or 2000)
    else:
        aggregate = replace(equation, solver=solver)
    factors = KroneckerFactors(fisher, by_rows, sharing=sharing, layers=layers, centred=centred, min_rows=min_rows)
    return Recipe(
        objective=PosteriorPull(eta) if pulled else TaskLoss(),
        evidence=(replace(factors, rank=rank, half=half, width=block_width),),
        memory=(KeepFactors(),) if pulled else (),
        aggregate=aggregate,
        steps=(ShareFactors(),) if pulled else (),
        publishes=("kron",) if pulled else (),
    )
