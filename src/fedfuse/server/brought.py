"""What every client brings to a fusion that counts by precision, in the weights' own units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedfuse.core.factor import Factor, as_stack
from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.posterior import Diag, Geometry, Kron
from fedfuse.linalg.psd import inverse
from fedfuse.linalg.subspace import reciprocal, times, written
from fedfuse.nets.blocks import Block, blocks_of

Parts = Iterator[tuple[str, Tensor]]


def brought_moves(cohort: Cohort) -> Parts:
    """For every part of the network what each client brings to it, (clients × numbers), seen from the median client.

    Where clients say how sure they are it is `moves_by_precision`, elsewhere how far they stand from the median.

    Example:
        >>> from fedfuse.core.messages import ClientUpdate
        >>> from fedfuse.core.posterior import Posterior
        >>> from fedfuse.core.spec import Spec
        >>> at = [{"w": torch.tensor([m])} for m in (-1.0, 0.0, 1.0)]
        >>> sure = [Diag({"w": torch.tensor([1.0])})] * 2 + [Diag({"w": torch.tensor([0.25])})]
        >>> beliefs = [Posterior(*pair) for pair in zip(at, sure)]
        >>> told = [ClientUpdate(c, b, 1.0, 1, Spec.of_tensors(b.mean)) for c, b in zip("abc", beliefs)]
        >>> [(name, moves.flatten().tolist()) for name, moves in brought_moves(Cohort.of(told))]
        [('w', [-0.75, 0.0, 1.5])]
    """
    centre = {n: cohort.stack(n).median(0).values for n in cohort.names if cohort.stack(n).is_floating_point()}
    blocks, done = {block.name: block.tensors for block in blocks_of(cohort.updates[0].spec)}, set[str]()
    for name, moves in moves_by_precision(cohort, [centre] * len(cohort)):
        yield name, moves
        done.update(blocks[name] if name in blocks and name not in centre else (name,))
    for name, middle in centre.items():
        if name not in done:
            yield name, (cohort.stack(name).double() - middle.double()).flatten(1)


def moves_by_precision(cohort: Cohort, origins: Sequence[Params]) -> Parts:
    """For every layer or tensor of which all clients say how sure they are, P̄⁻¹ P_k (w_k − o_k), (clients × numbers).

    P̄ is the mean of their precisions P_k. This is nearly what a product of their beliefs would lose without client k,
    whoever claims much or moves far. To every P_k a multiple of the identity as large as P̄ on average is added, so that
    nobody disappears by claiming nothing; clients that are equally sure bring their moves. Of Kronecker factors each
    side is taken by itself.

    Args:
        cohort: clients of one network.
        origins: for each of them, where its move begins.
    """
    geometries = [update.posterior.geometry for update in cohort]
    for block in _common_blocks(cohort, geometries):
        stacks = [torch.stack([block.matrices(p).double() for p in side]) for side in (_means(cohort), origins)]
        factors = [g.factors[block.name] for g in geometries if isinstance(g, Kron)]
        yield block.name, _by_factors(stacks[0] - stacks[1], factors, block.groups).flatten(1)
    for name, precision in _diagonal_precisions(cohort, geometries):
        moves = torch.stack([m[name].double() - o[name].double() for m, o in zip(_means(cohort), origins, strict=True)])
        shift = precision.mean()
        yield name, (moves * (precision + shift) / (precision.mean(0) + shift) if shift > 0 else moves).flatten(1)


def tells_precision(geometry: Geometry, note: str) -> bool:
    """Whether a note, "kind/layer/…" or "kind/tensor", is one that the geometry was made of.

    Example:
        >>> known = Diag({"w": torch.ones(1)})
        >>> tells_precision(known, "fisher/w"), tells_precision(known, "start_loss/mean")
        (True, False)
    """
    part = [*note.split("/"), ""][1]
    known = geometry.factors if isinstance(geometry, Kron) else geometry.variance if isinstance(geometry, Diag) else ()
    return part in known


def _common_blocks(cohort: Cohort, geometries: Sequence[Geometry]) -> Iterator[Block]:
    """The parts of the network of which everybody has factors."""
    if not all(isinstance(geometry, Kron) for geometry in geometries):
        return
    for block in blocks_of(cohort.updates[0].spec):
        if all(isinstance(g, Kron) and block.name in g.factors for g in geometries):
            yield block


def _means(cohort: Cohort) -> list[Params]:
    return [update.posterior.mean for update in cohort]


def _diagonal_precisions(cohort: Cohort, geometries: Sequence[Geometry]) -> Parts:
    """The precision of every tensor whose coordinates have variances of their own, told beside weights or with them."""
    for name in cohort.names:
        variances = [g.variance[name] for g in geometries if isinstance(g, Diag) and name in g.variance]
        if len(variances) == len(cohort):
            yield name, torch.stack([variance.double().reciprocal() for variance in variances])
    for name, log in cohort.updates[0].spec.layout.log_variances.items():
        if name in cohort.names:
            yield name, (-cohort.stack(log).double()).exp()


def _by_factors(moves: Tensor, factors: Sequence[tuple[Factor, Factor]], groups: int) -> Tensor:
    """B̄⁻¹ B_k M_k A_k Ā⁻¹ of every client's M_k, (clients × groups × out × in)."""
    inputs, outputs = ([as_stack(pair[side]) for pair in factors] for side in (0, 1))
    for group in range(groups):
        by_inputs, by_outputs = (_relative([f[group] for f in side]) for side in (inputs, outputs))
        for client, move in enumerate(moves[:, group]):
            moves[client, group] = by_outputs(client, by_inputs(client, move).mT).mT
    return moves


def _relative(factors: Sequence[Factor]) -> Callable[[int, Tensor], Tensor]:
    """X ↦ X F_k F̄⁻¹, with a client's factor over the mean of all; X itself where they say nothing."""
    whole = [written(factor) for factor in factors]
    if len({each.ndim for each in whole}) > 1:
        whole = [torch.diag(each) if each.ndim == 1 else each for each in whole]
    mean = torch.stack(whole).mean(0)
    shift = (mean if mean.ndim == 1 else mean.diagonal()).mean()
    if not shift > 0:
        return lambda _, moved: moved
    even = shift if mean.ndim == 1 else shift * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    over = reciprocal(mean + even) if mean.ndim == 1 else inverse(mean + even)
    return lambda client, moved: times(times(moved, whole[client] + even), over)
