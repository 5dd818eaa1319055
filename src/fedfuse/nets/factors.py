"""How Kronecker factors travel: as named tensors that the door can judge.

A factor called "kron/LAYER/in" or "kron/LAYER/out" is one of

- the upper triangle of a matrix, under that name;
- a diagonal, under "…/diagonal";
- r leading eigenvectors and r + 1 numbers, their eigenvalues and one for the rest, under "…/vectors" and "…/values";
- the upper triangles of blocks along its diagonal, under "…/block0", "…/block1", and so on.

Where a layer has several groups, theirs are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, takewhile

import torch
from torch import Tensor

from fedfuse.core.factor import BlockDiagonal, Factor, LowRank, block_sizes, dense
from fedfuse.core.messages import Flaw, Form
from fedfuse.core.params import Params
from fedfuse.linalg.psd import is_psd, leading_eigenpairs, pack, packed_size, unpack
from fedfuse.nets.blocks import Block, Factors

SIDES = ("in", "out")

_MAX_TRACE = 1e12  # far above what honest gradients give, far below where sums of products overflow
_LEAST = 1e-30  # a smaller factor has entries that no float32 holds, and would not arrive as the matrix it is
_UNIT = 1e-2  # how far from one the length of an eigenvector may be; float16 rounds it by less than 1e-3


@dataclass(frozen=True, slots=True)
class Packing:
    """The form in which factors leave a client.

    Attributes:
        rank: how many leading eigenpairs of a factor; None for all of it. A factor whose triangle is no larger than its
            eigenpairs goes as the triangle.
        half: whether eigenvectors go in float16.
        outputs: whether output factors are matrices; else they are diagonal, as the identity is.
        width: a factor of more rows goes as blocks of at most so many along its diagonal; None for all of it.
    """

    rank: int | None = None
    half: bool = False
    outputs: bool = True
    width: int | None = None

    def forms(self, block: Block, forms: Mapping[str, Form]) -> dict[str, Form]:
        """What one block's factors look like."""
        wanted: dict[str, Form] = {}
        many = (block.groups,) if block.groups > 1 else ()
        for side, size in zip(SIDES, block.sizes(forms), strict=True):
            path = f"kron/{block.name}/{side}"
            if block.has_diagonal_inputs if side == "in" else not self.outputs:
                wanted[f"{path}/diagonal"] = Form((*many, size), torch.float32)
            elif self._is_low(size) and self.rank is not None:
                wanted[f"{path}/vectors"] = Form((*many, size, self.rank), self._narrow)
                wanted[f"{path}/values"] = Form((*many, self.rank + 1), torch.float32)
            elif self.width is not None and size > self.width:
                for place, part in enumerate(block_sizes(size, self.width)):
                    wanted[f"{path}/block{place}"] = Form((*many, packed_size(part)), torch.float32)
            else:
                wanted[path] = Form((*many, packed_size(size)), torch.float32)
        return wanted

    def notes(self, block: Block, factors: Factors) -> dict[str, Tensor]:
        """One block's factors as named tensors; stacks of one are unstacked."""
        notes: dict[str, Tensor] = {}
        for side, factor in zip(SIDES, factors, strict=True):
            for what, tensor in self._parts(factor):
                notes[f"kron/{block.name}/{side}{what}"] = (tensor[0] if len(tensor) == 1 else tensor).cpu()
        return notes

    @property
    def _narrow(self) -> torch.dtype:
        return torch.float16 if self.half else torch.float32

    def _is_low(self, size: int) -> bool:
        return self.rank is not None and self.rank * (size + 1) + 1 < packed_size(size)

    def _parts(self, factor: Factor) -> Iterator[tuple[str, Tensor]]:
        if isinstance(factor, LowRank):
            yield "/diagonal", _in_float32(factor.rest, (-1,))
            return
        if isinstance(factor, Tensor) and self.width is not None and factor.shape[-1] > self.width:
            factor = BlockDiagonal.of(factor, self.width)
        if isinstance(factor, BlockDiagonal):
            for place, part in enumerate(factor.parts):
                yield f"/block{place}", pack(_in_float32(part, (-2, -1)))
            return
        if self.rank is None or not self._is_low(factor.shape[-1]):
            yield "", pack(_in_float32(factor, (-2, -1)))
            return
        pairs = [leading_eigenpairs(matrix, self.rank) for matrix in factor]
        yield "/vectors", torch.stack([vectors for vectors, _ in pairs]).to(self._narrow)
        yield "/values", _in_float32(torch.stack([values for _, values in pairs]), (-1,))


def _in_float32(factor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The factor as it travels: in float32, and zero where it is too small to be told from that."""
    present = factor.abs().amax(axes, keepdim=True) >= _LEAST
    return torch.where(present, factor, 0.0).float()


def layers_in(notes: Params) -> tuple[str, ...]:
    """The layers whose factors stand in these notes.

    Example:
        >>> layers_in({"kron/fc/in": torch.ones(1), "kron/fc/out/values": torch.ones(2), "kron/damping": torch.ones(3)})
        ('fc',)
    """
    split = (name.split("/") for name in notes)
    return tuple(dict.fromkeys(parts[1] for parts in split if parts[0] == "kron" and len(parts) > 2))


@dataclass(frozen=True, slots=True)
class _UnpackedFactors(Mapping[str, Factors]):
    """Factors by layer, unpacked at every access and not kept."""

    notes: Params
    layers: tuple[str, ...]

    def __getitem__(self, layer: str) -> Factors:
        A, B = (read_factor(self.notes, f"kron/{layer}/{side}") for side in SIDES)
        if A is None or B is None:
            raise KeyError(layer)
        return A, B

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers  # nothing is unpacked to answer that

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def factors_in(notes: Params) -> Mapping[str, Factors]:
    """Both factors of every layer that has them in these notes, fetched and unpacked when asked for."""
    return _UnpackedFactors(notes, layers_in(notes))


def read_factor(notes: Params, path: str) -> Factor | None:
    """The factor that stands under a path, in whichever form; None if there is none.

    Example:
        >>> read_factor({"fc/in": torch.tensor([1.0, 0.0, 2.0])}, "fc/in")
        tensor([[1., 0.],
                [0., 2.]])
    """
    if path in notes:
        return unpack_triangle(notes[path])
    if f"{path}/diagonal" in notes:
        return LowRank.diagonal(notes[f"{path}/diagonal"])
    if f"{path}/block0" in notes:
        names = takewhile(notes.__contains__, (f"{path}/block{place}" for place in count()))
        return BlockDiagonal(tuple(unpack_triangle(notes[name]) for name in names))
    if f"{path}/values" not in notes:
        return None
    values = notes[f"{path}/values"]
    return LowRank.leading(notes[f"{path}/vectors"].to(values.dtype), values[..., :-1], values[..., -1])


def unpack_triangle(triangle: Tensor) -> Tensor:
    """The symmetric matrix of a packed triangle, or the stack of them, whatever their size."""
    return unpack(triangle, (math.isqrt(8 * triangle.shape[-1] + 1) - 1) // 2)


def find_flaw(notes: Params, path: str) -> Flaw | None:
    """What makes a well-formed factor no positive semi-definite matrix of a bounded trace, if anything does."""
    factor = read_factor(notes, path)
    if isinstance(factor, LowRank):
        return _flaw_of_low_rank(notes, path, factor.double())
    if factor is None:
        return Flaw(path, "nothing", "a factor")
    parts = factor.parts if isinstance(factor, BlockDiagonal) else (factor,)
    matrices = (matrix for part in parts for matrix in (part.unsqueeze(0) if part.ndim == 2 else part))
    return next((flaw for matrix in matrices if (flaw := _flaw_of_matrix(path, matrix))), None)


def _flaw_of_matrix(path: str, matrix: Tensor) -> Flaw | None:
    if flaw := _flaw_of_trace(path, float(matrix.double().trace())):
        return flaw
    return None if is_psd(matrix) else Flaw(path, "not positive semi-definite", "a matrix without negative eigenvalues")


def _flaw_of_low_rank(notes: Params, path: str, factor: LowRank) -> Flaw | None:
    """Eigenvalues that are none below the rest, which is not negative, make any directions a valid matrix."""
    if float(factor.rest.min()) < 0:
        field = f"{path}/diagonal" if factor.is_diagonal else f"{path}/values"
        return Flaw(field, float(factor.rest.min()), "numbers ≥ 0")
    if not factor.is_diagonal:
        if float(factor.values.min()) < 0:
            expected = "eigenvalues not below the last number, which stands for the rest"
            return Flaw(f"{path}/values", notes[f"{path}/values"].tolist(), expected)
        lengths = factor.vectors.square().sum(-2)
        if float((lengths - 1).abs().max()) > _UNIT:
            return Flaw(
                f"{path}/vectors", f"a column of squared length {float(lengths.max()):.3g}", "columns of length 1"
            )
    return next((flaw for trace in factor.trace().flatten().tolist() if (flaw := _flaw_of_trace(path, trace))), None)


def _flaw_of_trace(path: str, trace: float) -> Flaw | None:
    return (
        None if 0 <= trace <= _MAX_TRACE else Flaw(path, f"a trace of {trace:.3g}", f"a trace from 0 to {_MAX_TRACE:g}")
    )


def mean_eigenvalue_of(notes: Params, path: str) -> float:
    """The mean eigenvalue of the factor under a path, over all its groups.

    Example:
        >>> mean_eigenvalue_of({"fc/in/diagonal": torch.tensor([1.0, 3.0])}, "fc/in")
        2.0
    """
    factor = read_factor(notes, path)
    if isinstance(factor, LowRank):
        return float((factor.double().trace() / factor.rest.shape[-1]).mean())
    if isinstance(factor, BlockDiagonal):
        return float((factor.double().trace() / sum(factor.sizes)).mean())
    return 0.0 if factor is None else float(factor.diagonal(dim1=-2, dim2=-1).double().mean())


def mean_factor(factors: list[Factor], weights: list[float]) -> Factor:
    """Σ w_k F_k: a diagonal if all are, else written out."""
    if all(isinstance(f, LowRank) and f.is_diagonal for f in factors):
        rests = [f.rest.double() for f in factors if isinstance(f, LowRank)]
        return LowRank.diagonal(torch.stack([w * r for w, r in zip(weights, rests, strict=True)]).sum(0))
    return torch.stack([w * dense(f).double() for w, f in zip(weights, factors, strict=True)]).sum(0)
