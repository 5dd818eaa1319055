"""Kronecker factors of the Fisher information, layer by layer: how sharply a client believes its weights.

A layer M = [W | b] sees rows a (its input with a 1 appended; for a convolution, one patch per output position) and
sends back gradients g of the loss at its output. With N examples and S positions per example,

    A = Σ a aᵀ / (N S²),   B = S Σ g gᵀ / N,   Fisher of the layer ≈ A ⊗ B          (arXiv:2310.00339, eqs. 10, 27)

which for S = 1 are plain averages over examples. Only A ⊗ B is fixed by the mathematics; this way of sharing S
between the two is the released one, and matters to damping alone. Positions are taken for further examples ("expand").
The alternative ("reduce") takes an example for its mean input ā = Σ_s a_s / S and the sum ḡ = Σ_s g_s of its gradients,

    A = Σ ā āᵀ / N,   B = Σ ḡ ḡᵀ / N                                                 (arXiv:2311.00636, section 3)

which is right where positions are averaged before the loss sees them. A norm's weight and bias have the diagonal of
their Fisher information, as every entry acts on a channel of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from fedfuse.client.fisher import Fisher, diagonal_fisher
from fedfuse.client.recording import BATCH, LayerCall, layer_passes
from fedfuse.client.second_moments import input_moments, input_sums, outer_sum, output_moments, output_sums
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry, Kron
from fedfuse.core.rows import Rows
from fedfuse.core.seams import CurvatureEvidence, Effort
from fedfuse.core.state import Local
from fedfuse.linalg.factor import BlockDiagonal, Factor, LowRank, dense
from fedfuse.linalg.kron import Split, balance
from fedfuse.nets.cost import layer_costs
from fedfuse.nets.kronecker import (
    SIDES,
    Block,
    Factors,
    Packing,
    Which,
    blocks_of,
    factors_in,
    find_flaw,
    layers_in,
    mean_eigenvalue_of,
)
from fedfuse.tasks import CLASSIFICATION, Task
from fedfuse.wire.codec import forms_of

_log = logging.getLogger(__name__)

Sharing: TypeAlias = Literal["expand", "reduce"]

_SUMS = 1 << 27  # numbers that sums may hold at a time, 1 GiB; wider networks are gone through several times
_DECADES = range(-10, 3)  # in which the best damping is looked for: λ from 1e-10 to 1e2
_MAX_DAMPING = 1e3  # one decade further, where the search around the best decade ends


def kronecker_factors(
    module: nn.Module,
    blocks: Sequence[Block],
    rows: Rows,
    *,
    fisher: Fisher = "empirical",
    sharing: Sharing = "expand",
    centred: bool = False,
    batch: int | None = None,
    generator: torch.Generator | None = None,
    task: Task = CLASSIFICATION,
    kernel: str = "torch",
) -> dict[str, Factors]:
    """Both factors of every block's Fisher information over some rows, in one pass.

    Sums are kept in float64 and memory does not grow with the number of rows. A layer that is used several times in
    one forward pass counts every use as further positions; one that is not used at all has zero factors.

    Args:
        module: the network, in evaluation mode.
        blocks: which layers.
        rows: the examples.
        fisher: "empirical" takes the rows' own labels, "sampled" draws labels from the network's answer.
        sharing: whether positions are further examples ("expand") or one example's ("reduce").
        centred: whether A is of inputs less their mean, which then cannot be read off it.
        batch: rows per pass; by default 128 to begin with, and more where layers are small.
        generator: draws the labels.
        task: what the outputs mean: whose likelihood it is.
        kernel: who passes rows through the network: "torch", or anything else for compiled kernels where they know it.

    Returns:
        Per layer A and B, stacked over its groups: (groups × in × in) and (groups × out × out), float64; embeddings and
        norms have a diagonal A.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> rows = Rows(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
        >>> kronecker_factors(net, [Block("weight", "linear", "weight")], rows)["weight"][0].tolist()
        [[[1.0, 2.0], [2.0, 4.0]]]
    """
    forms = {n: Form.of(t) for n, t in module.state_dict().items()}
    watched = [block for block in blocks if block.kind != "norm"]
    sums = {b.name: _Sums.zeros(b, forms, rows.x.device, sharing, centred) for b in watched}
    drawn = None if fisher == "empirical" else partial(task.redraw, generator=generator)
    for calls, examples in layer_passes(module, watched, rows, task, drawn, batch, kernel):
        for block in watched:
            sums[block.name].add([(call, grad) for call, grad in calls if call.block is block], examples)
    found = {name: total.mean(len(rows)) for name, total in sums.items()}
    norms = [block.name for block in blocks if block.kind == "norm"]
    if norms:
        options = {"fisher": fisher, "batch": batch or BATCH, "generator": generator, "task": task}
        spread = diagonal_fisher(module, rows, names=norms, **options)  # type: ignore[arg-type]
        for name, value in spread.items():  # a diagonal on the inputs' side, and nothing on the other
            flat = value.flatten()[None]
            ones = torch.ones(1, 1, 1, dtype=torch.float64, device=flat.device)
            found[name] = LowRank.diagonal(flat), ones
    return {block.name: found[block.name] for block in blocks}


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """One block's sums over the rows seen so far, and per group the number of positions."""

    block: Block
    A: Tensor
    B: Tensor
    positions: Tensor
    sharing: Sharing
    centred: bool

    @classmethod
    def zeros(
        cls, block: Block, forms: Mapping[str, Form], device: torch.device, sharing: Sharing, centred: bool
    ) -> _Sums:
        inn, out = block.sizes(forms)
        inn += centred and block.bias is None and not block.has_diagonal_inputs
        shapes = ((inn,) if block.has_diagonal_inputs else (inn, inn), (out, out), ())
        A, B, positions = (torch.zeros(block.groups, *d, dtype=torch.float64, device=device) for d in shapes)
        return cls(block, A, B, positions, sharing, centred)

    @property
    def one(self) -> bool:
        """Whether a 1 stands behind what is read: for the bias, or to know the mean."""
        return self.block.bias is not None or self.centred

    def add(self, calls: Sequence[tuple[LayerCall, Tensor]], examples: int) -> None:
        """Add one batch; where each matrix has inputs of its own, one after another."""
        for group in dict.fromkeys(call.group for call, _ in calls):
            mine = [(call, _mask_padding(call, grad)) for call, grad in calls if call.group == group]
            where = slice(None) if group is None else slice(group, group + 1)
            by_example = self.sharing == "reduce" and all(len(call.x) == examples for call, _ in mine)
            if by_example:
                self._add_reduced(where, mine, examples)
            else:
                self._add_expanded(where, mine)

    def mean(self, rows: int) -> Factors:
        """The factors, Σ a aᵀ / (N S²) and S Σ g gᵀ / N."""
        S = (self.positions / rows).view(-1, 1)
        inputs = S if self.block.has_diagonal_inputs else S[..., None]
        A = self.A / torch.where(inputs > 0, rows * inputs.square(), 1.0)
        if self.centred and not self.block.has_diagonal_inputs:
            A = _remove_mean(A, self.block.bias is not None)
        return (LowRank.diagonal(A) if self.block.has_diagonal_inputs else A), self.B * S[..., None] / rows

    def _add_expanded(self, where: slice, calls: Sequence[tuple[LayerCall, Tensor]]) -> None:
        """Σ a aᵀ and Σ g gᵀ over positions; tokens that pad are none."""
        for call, grad in calls:
            inputs = input_moments(call.module, call.x, self.one)
            outputs, columns = output_moments(call.module, grad)
            self.A[where].add_(inputs)
            self.B[where].add_(outputs)
            self.positions[where].add_(float(inputs.sum()) if self.block.has_diagonal_inputs else columns)

    def _add_reduced(self, where: slice, calls: Sequence[tuple[LayerCall, Tensor]], examples: int) -> None:
        """Σ ā āᵀ and Σ ḡ ḡᵀ over examples, every use of the layer counting towards one example's."""
        outs = [output_sums(call.module, grad) for call, grad in calls]
        ins = [input_sums(call.module, call.x, self.one) for call, _ in calls]
        mean = torch.stack(ins).sum(0) / sum(positions for _, positions in outs)
        self.A[where].add_(mean.square().sum(0) if self.block.has_diagonal_inputs else outer_sum(mean))
        self.B[where].add_(outer_sum(torch.stack([gradients for gradients, _ in outs]).sum(0)))
        self.positions[where].add_(examples)


def _mask_padding(call: LayerCall, grad: Tensor) -> Tensor:
    """The gradient that a layer learns from, nothing of what pads: neither positions nor an embedding's token."""
    grad = grad if call.known is None else grad[call.known]
    if isinstance(call.module, nn.Embedding) and call.module.padding_idx is not None:
        return grad * (call.x != call.module.padding_idx)[..., None]
    return grad


def _remove_mean(A: Tensor, one: bool) -> Tensor:
    """The moments of inputs less their mean, which the last column holds; that column is zero then, or goes."""
    corner = A[:, -1:, -1:]
    mean = A[:, :-1, -1:]
    centred = torch.zeros_like(A)
    centred[:, :-1, :-1] = A[:, :-1, :-1] - mean @ mean.mT / torch.where(corner > 0, corner, 1.0)
    centred[:, -1:, -1:] = corner
    return centred if one else centred[:, :-1, :-1]


@dataclass(frozen=True, slots=True)
class KroneckerFactors(CurvatureEvidence):
    """The raw factors A and B of every layer that has them.

    Damping is left to the server, so that comparing dampings and solvers asks clients nothing new. A grouped
    convolution sends one pair per group, an attention one for queries, keys and values each. Tied and frozen weights
    have no factors.

    Attributes:
        fisher: "empirical" takes the rows' own labels, "sampled" draws labels from the network's answer.
        choose: also send the damping that the client's own rows prefer (see `best_damping`).
        batch: rows per pass; None for 128 to begin with, and more where layers are small.
        rank: send so many leading eigenpairs of each factor and one number for the rest; None for all of it.
        half: send eigenvectors in float16.
        sharing: whether positions are further examples ("expand") or one example's ("reduce").
        layers: "all", or "plain": linear layers and convolutions alone.
        centred: take A of inputs less their mean.
        min_rows: a client with fewer rows sends no directions, only how large its factors are; None for twice the
            batch it trains with.
        width: of factors with more rows, send blocks of at most so many along their diagonals; None for all of them.
    """

    fisher: Fisher = "empirical"
    choose: bool = False
    batch: int | None = None
    rank: int | None = None
    half: bool = False
    sharing: Sharing = "expand"
    layers: Which = "all"
    centred: bool = False
    min_rows: int | None = None
    width: int | None = None
    name: ClassVar[str] = "kron"
    weighs: ClassVar[bool] = True

    @property
    def reveals(self) -> str:
        """Means are told apart, for they are what a reader of the factors has for nothing."""
        mean = "" if self.centred else " and the mean input of every layer with a bias,"
        return (
            f"second moments of every layer's inputs and gradients,{mean} averaged over the client's rows; the last "
            "layer's tell which classes it has, an embedding's how often each token occurs"
        )

    @property
    def packing(self) -> Packing:
        """The form in which factors leave the client."""
        return Packing(self.rank, self.half, width=self.width)

    def __call__(self, local: Local) -> Params:
        """One pass over the rows with the trained weights."""
        blocks, few = blocks_of(local.brief.spec, self.layers), too_few_rows(local, self.min_rows)
        notes: dict[str, Tensor] = {}
        for some in (blocks,) if self.choose else self._passes_over(blocks, local):
            factors = self._factors(some, local)
            if few:
                factors = {layer: (even_out(A), even_out(B)) for layer, (A, B) in factors.items()}
            for block in some:
                notes |= self.packing.notes(block, factors[block.name])
        return notes | (_preferred_damping(local, blocks, factors) if self.choose else {})

    def _factors(self, blocks: Sequence[Block], local: Local) -> dict[str, Factors]:
        """One pass over the rows; every pass draws the same labels."""
        return kronecker_factors(
            local.module,
            blocks,
            local.rows,
            fisher=self.fisher,
            sharing=self.sharing,
            centred=self.centred,
            batch=self.batch,
            generator=local.stream("fisher"),
            task=local.task,
            kernel=local.settings.kernel,
        )

    def _passes_over(self, blocks: Sequence[Block], local: Local) -> Iterator[Sequence[Block]]:
        """The blocks of each pass: as many as have sums that fit the memory, one at least."""
        forms, some, size = forms_of(local.brief.params), list[Block](), 0
        for block in blocks:
            inn, out = block.sizes(forms)
            more = block.groups * ((inn if block.has_diagonal_inputs else inn * inn) + out * out)
            if some and size + more > _SUMS:
                yield some
                some, size = [], 0
            some.append(block)
            size += more
        yield some

    def passes(self, effort: Effort) -> float:
        """A pass forward, one back to every layer's output, and the products of A and B: d² + d′² for d d′."""
        costs = layer_costs(effort.spec, effort.shape)
        blocks = [(costs[b.name], b) for b in blocks_of(effort.spec, self.layers) if b.name in costs]
        forms = {n: Form.of(t) for n, t in effort.spec.skeleton().state_dict().items()}
        sizes = [(cost.positions * block.groups, *block.sizes(forms)) for cost, block in blocks]
        moments = sum(times * (inn * inn + out * out) for times, inn, out in sizes)
        return 2 + moments / max(1, sum(cost.products for cost in costs.values()))

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """Two factors per layer."""
        forms = forms_of(brief.params)
        wanted: dict[str, Form] = {}
        for block in blocks_of(brief.spec, self.layers):
            wanted |= self.packing.forms(block, forms)
        chosen = {f"kron/{what}": Form((3,), torch.float64) for what in ("damping", "evidence")}
        return wanted | (chosen if self.choose else {})

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Factors are positive semi-definite with a bounded trace; a chosen damping is positive."""
        for path in _paths(notes):
            if flaw := find_flaw(notes, path):
                return flaw
        if self.choose and not bool(((notes["kron/damping"] > 0) & (notes["kron/damping"] <= _MAX_DAMPING)).all()):
            return Flaw("kron/damping", notes["kron/damping"].tolist(), f"numbers above 0 and up to {_MAX_DAMPING:g}")
        return None

    def geometry(self, notes: Params) -> Geometry | None:
        """Raw Kronecker factors per layer, fetched and unpacked when asked for."""
        return Kron(factors_in(notes))

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean eigenvalue of every factor; what damping adds to it differs by decades between honest clients."""
        return {path: mean_eigenvalue_of(notes, path) for path in _paths(notes)}


def _paths(notes: Params) -> Iterator[str]:
    return (f"kron/{layer}/{side}" for layer in layers_in(notes) for side in SIDES)


def too_few_rows(local: Local, min_rows: int | None) -> bool:
    """Whether a client has so few rows that its factors would reveal single ones; a warning says so.

    Args:
        local: the client.
        min_rows: how many are enough; by default twice the batch it trains with.
    """
    least = 2 * local.settings.batch_size if min_rows is None else min_rows
    if len(local.rows) < least:
        _log.warning(
            "%s has %d rows, and factors of fewer than %d would tell of single ones: it sends their size alone "
            "(min_rows sets the number)",
            local.client,
            len(local.rows),
            least,
        )
    return len(local.rows) < least


def even_out(factor: Factor) -> Factor:
    """The multiple of the identity with the same trace, of each matrix of a stack: it tells no direction."""
    if isinstance(factor, LowRank):
        return LowRank.diagonal(factor.rest.mean(-1, keepdim=True).expand_as(factor.rest))
    if isinstance(factor, BlockDiagonal):
        mean = factor.trace()[:, None, None] / sum(factor.sizes)
        return BlockDiagonal(
            tuple(mean * torch.eye(size, dtype=mean.dtype, device=mean.device) for size in factor.sizes)
        )
    sizes = factor.diagonal(dim1=-2, dim2=-1).mean(-1)
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device) * sizes[:, None, None]


def _preferred_damping(local: Local, blocks: Sequence[Block], factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """The damping that the marginal likelihood prefers, and that likelihood, for every way of splitting it.

    Diagonal factors are left out: they are many and small, and one λ for all of them would be theirs.
    """
    now = {n: t.detach() for n, t in local.module.state_dict().items()}
    beliefs = [
        LayerBelief.of(A.float(), B.float(), new - old)
        for block in blocks
        if not block.has_diagonal_inputs
        for A, B, new, old in zip(
            *(dense(factor) for factor in factors[block.name]),
            block.matrices(now).double(),
            block.matrices(dict(local.brief.params)).double().to(local.settings.device),
            strict=True,
        )
    ]
    damping, evidence = best_damping(beliefs, len(local.rows))
    return {"kron/damping": damping, "kron/evidence": evidence}


def best_damping(beliefs: Sequence[LayerBelief], rows: int) -> tuple[Tensor, Tensor]:
    """For every split ("one", "trace", "frobenius") the λ of largest evidence, and that evidence, both float64.

    Example:
        >>> moved = LayerBelief.of(torch.eye(2), torch.eye(2), torch.full((2, 2), 3.0))
        >>> still = LayerBelief.of(torch.eye(2), torch.eye(2), torch.full((2, 2), 0.1))
        >>> bool(best_damping([still], 10)[0][0] > best_damping([moved], 10)[0][0])
        True
    """
    from scipy.optimize import minimize_scalar  # late: it is long to load, and few ask for it

    found: list[tuple[float, float]] = []
    for split in range(len(get_args(Split))):

        def loss(exponent: float, split: int = split) -> float:
            return -sum(b.log_evidence(rows, 10.0**exponent, b.balances[split]) for b in beliefs)

        # the evidence can have several maxima: decades first, then the best place around the best of them
        decade = min(_DECADES, key=loss)
        fine = minimize_scalar(loss, bounds=(decade - 1, decade + 1), method="bounded", options={"xatol": 0.01})
        found.append((10.0 ** float(fine.x), -float(fine.fun)))
    return torch.tensor([lam for lam, _ in found]).double(), torch.tensor([value for _, value in found]).double()


@dataclass(frozen=True, slots=True, eq=False)
class LayerBelief:
    """A layer's Fisher factors and move, in the eigenvectors of the factors.

    Attributes:
        inputs: α, the eigenvalues of A.
        outputs: β, the eigenvalues of B.
        squared: D_ij², (out × in).
        balances: π of every split.
    """

    inputs: Tensor
    outputs: Tensor
    squared: Tensor
    balances: tuple[float, ...]

    @classmethod
    def of(cls, A: Tensor, B: Tensor, move: Tensor) -> LayerBelief:
        """The belief of a layer with factors A (in × in) and B (out × out) that moved by `move` (out × in)."""
        if not (bool(A.any()) and bool(B.any())):  # as `damp` has it: what informs about nothing leaves the damping
            A, B = torch.zeros_like(A), torch.zeros_like(B)
        alpha, left = torch.linalg.eigh(A.double())
        beta, right = torch.linalg.eigh(B.double())
        turned = right.mT @ move.double() @ left
        balances = tuple(balance(A, B, split) for split in get_args(Split))
        return cls(alpha.clamp(min=0), beta.clamp(min=0), turned.square(), balances)

    def log_evidence(self, rows: int, damping: float, pi: float) -> float:
        """The part of log p(rows | λ, π) that depends on λ and π, by Laplace's approximation.

        The damped product (α_j + π√λ)(β_i + √λ/π) is α_j β_i + p_ij with p_ij = λ + √λ (α_j/π + π β_i): the precision
        of the likelihood, per row, and that of a prior, which is what damping adds. With D the move from its mean

            log p = ½ Σ_ij log p_ij − log((α_j + π√λ)(β_i + √λ/π)) − N p_ij D_ij².

        Example:
            >>> one = LayerBelief.of(torch.eye(1), torch.eye(1), torch.zeros(1, 1))
            >>> round(one.log_evidence(rows=5, damping=1.0, pi=1.0), 4) == round(0.5 * math.log(3 / 4), 4)
            True
        """
        root = math.sqrt(damping)
        prior = damping + root * (self.inputs / pi + pi * self.outputs[:, None])
        posterior = (self.inputs + pi * root).log() + (self.outputs + root / pi).log()[:, None]
        return 0.5 * float((prior.log() - posterior - rows * prior * self.squared).sum())
