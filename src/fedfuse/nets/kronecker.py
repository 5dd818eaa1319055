"""The parts of a network that have Kronecker factors, each as a matrix [W | b], and how those factors travel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, takewhile
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.messages import Flaw, Form
from fedfuse.core.params import Layer, Layout, Params
from fedfuse.core.spec import Spec
from fedfuse.linalg.factor import BlockDiagonal, Factor, LowRank, block_sizes, dense
from fedfuse.linalg.psd import is_psd, leading_eigenpairs, pack, packed_size, unpack

Factors: TypeAlias = tuple[Factor, Factor]
Kind: TypeAlias = Literal["linear", "conv", "transposed", "turned", "embedding", "attention", "norm"]
Which: TypeAlias = Literal["all", "plain"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a network that has Kronecker factors, as `groups` matrices [W | b] of one size (out × in).

    A linear layer and a convolution are what they are, a grouped convolution one matrix per group, and the packed
    projections of an attention three. A transposed convolution is the convolution with its kernel turned around that
    gives the same outputs from inputs set apart by its stride. An embedding reads one token at a time, so its input
    factor is diagonal; a norm's weight or bias is one row whose entries do not know each other.

    Attributes:
        name: what its factors are called: the layer's name, or the tensor's.
        kind: how its tensors become matrices.
        weight: the weight's name.
        bias: the bias's name, if it has one.
        groups: how many matrices; each has factors of its own, and they are stacked.
    """

    name: str
    kind: Kind
    weight: str
    bias: str | None = None
    groups: int = 1

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def has_diagonal_inputs(self) -> bool:
        """Whether A is diagonal, whatever the rows are."""
        return self.kind in ("embedding", "norm")

    def matrices(self, params: Params) -> Tensor:
        """[W | b] of every group, (groups × out × in)."""
        weight = self._as_rows(params[self.weight])
        if self.bias is None:
            return weight
        return torch.cat([weight, params[self.bias].view(self.groups, -1, 1)], -1)

    def split(self, matrices: Tensor, like: Params) -> dict[str, Tensor]:
        """The inverse of `matrices`, with the shapes and dtypes of `like`."""
        weight = like[self.weight]
        if self.bias is None:
            return {self.weight: self._from_rows(matrices, weight)}
        bias = matrices[..., -1].reshape(like[self.bias].shape).to(like[self.bias].dtype)
        return {self.weight: self._from_rows(matrices[..., :-1], weight), self.bias: bias}

    def sizes(self, forms: Mapping[str, Form]) -> tuple[int, int]:
        """How many rows A and B have, per group."""
        shape = forms[self.weight].shape
        if self.kind == "norm":
            return math.prod(shape), 1
        if self.kind == "embedding":
            return shape[0], shape[1]
        if self.kind == "turned":
            return shape[0] + (self.bias is not None), shape[1]
        if self.kind == "transposed":
            return shape[0] // self.groups * math.prod(shape[2:]) + (self.bias is not None), shape[1]
        return math.prod(shape[1:]) + (self.bias is not None), shape[0] // self.groups

    def _as_rows(self, weight: Tensor) -> Tensor:
        if self.kind == "norm":
            return weight.reshape(1, 1, -1)
        if self.kind in ("embedding", "turned"):
            return weight.mT[None]
        if self.kind == "transposed":
            return self._turn_kernel(weight.unflatten(0, (self.groups, -1))).transpose(1, 2).flatten(2)
        return weight.flatten(1).view(self.groups, -1, math.prod(weight.shape[1:]))

    def _from_rows(self, matrices: Tensor, like: Tensor) -> Tensor:
        if self.kind in ("embedding", "turned"):
            matrices = matrices[0].mT
        elif self.kind == "transposed":
            inputs, out, *kernel = like.shape
            apart = matrices.reshape(self.groups, out, inputs // self.groups, *kernel)
            matrices = self._turn_kernel(apart.transpose(1, 2))
        return matrices.reshape(like.shape).to(like.dtype)

    @staticmethod
    def _turn_kernel(weight: Tensor) -> Tensor:
        return weight.flip(tuple(range(3, weight.ndim)))


@lru_cache(maxsize=16)
def blocks_of(spec: Spec, which: Which = "all") -> tuple[Block, ...]:
    """The parts of a network that have Kronecker factors: those whose weights are their own.

    A tied weight belongs to several layers, and a frozen one is not learned: those have none.

    Args:
        spec: the network.
        which: "all", or "plain": linear layers and convolutions alone.

    Example:
        >>> [b.name for b in blocks_of(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}))]
        ['fc1', 'classifier']
    """
    return blocks_in(spec.layout, which)


def mixing_blocks(spec: Spec, which: Which = "all") -> tuple[Block, ...]:
    """The parts of a network that mix what they read: all that have factors but norms."""
    return tuple(block for block in blocks_of(spec, which) if block.kind != "norm")


def blocks_in(layout: Layout, which: Which = "all") -> tuple[Block, ...]:
    """The same, read off a layout."""
    own = frozenset(layout.trainable).difference(*layout.tied)
    wanted = (b for b in _every_block(layout) if which == "all" or b.kind in ("linear", "conv"))
    return tuple(block for block in wanted if own.issuperset(block.tensors))


def _every_block(layout: Layout) -> Iterator[Block]:
    for layer in layout.layers:
        if layer.kind != "other":
            yield _block(layer, layout)
    for name in layout.with_role("norm"):
        yield Block(name, "norm", name)


def _block(layer: Layer, layout: Layout) -> Block:
    if layer.is_plain:
        return Block(layer.name, layer.kind, layer.weight, layer.bias, layer.groups)  # type: ignore[arg-type]
    bias = layer.weight.removesuffix("weight") + "bias"  # up.weight and up.bias, attn.in_proj_weight and …_bias
    has_bias = layer.kind != "embedding" and layout.roles.get(bias) == "bias"
    groups = 3 if layer.kind == "attention" else layer.groups
    return Block(layer.name, layer.kind, layer.weight, bias if has_bias else None, groups)  # type: ignore[arg-type]


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
    """The factor as it travels: in float32, and zero where it is too small for that."""
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
