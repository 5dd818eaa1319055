"""Kronecker factors of the Fisher information, layer by layer: how sharply a client believes its weights.

A layer M = [W | b] sees rows a (its input with a 1 appended; for a convolution, one patch per output position) and
sends back gradients g of the loss at its output. With N examples and S positions per example,

    A = Σ a aᵀ / (N S²),   B = S Σ g gᵀ / N,   Fisher of the layer ≈ A ⊗ B          (arXiv:2310.00339, eqs. 10, 27)

which for S = 1 are plain averages over examples. Only A ⊗ B is fixed by the mathematics; this way of sharing S
between the two is the released one, and matters to damping alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.client.evidence.marginal import LayerBelief, best_damping
from fedfuse.client.moments import input_moments, output_moments
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry, Kron
from fedfuse.core.precision import in_full
from fedfuse.core.rows import Rows
from fedfuse.core.state import Local
from fedfuse.linalg.psd import is_psd, pack, packed_size, unpack
from fedfuse.nets.blocks import Block, Factors, blocks_of
from fedfuse.wire.codec import forms_of

Fisher = Literal["empirical", "sampled"]

_MAX_TRACE = 1e12  # far above what honest gradients give, far below where sums of products overflow
_LEAST = 1e-30  # a smaller factor has entries that no float32 holds, and would not arrive as the matrix it is


def kronecker_factors(
    module: nn.Module,
    blocks: Sequence[Block],
    rows: Rows,
    *,
    fisher: Fisher = "empirical",
    batch: int = 128,
    generator: torch.Generator | None = None,
) -> dict[str, Factors]:
    """Both factors of every block's Fisher information over some rows, in one pass.

    Sums are kept in float64 and memory does not grow with the number of rows. A layer that is used several times in
    one forward pass counts every use as further positions; one that is not used at all has zero factors.

    Args:
        module: the network, in evaluation mode.
        blocks: which layers.
        rows: the examples.
        fisher: "empirical" takes the rows' own labels, "sampled" draws labels from the network's answer.
        batch: rows per pass.
        generator: draws the labels.

    Returns:
        Per layer A and B, stacked over its groups: (groups × in × in) and (groups × out × out), float64.

    Example:
        >>> from fedfuse.core.params import Layer
        >>> net = nn.Linear(2, 2, bias=False)
        >>> rows = Rows(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
        >>> kronecker_factors(net, [Block(Layer("weight", "linear", "weight"))], rows)["weight"][0].tolist()
        [[[1.0, 2.0], [2.0, 4.0]]]
    """
    forms = {n: Form.of(t) for n, t in module.state_dict().items()}
    sums = {b.layer.name: _zeros(b, forms, rows.x.device) for b in blocks}
    with _record_calls(module, blocks) as calls:
        for begin in range(0, len(rows), batch):
            x, y = rows.x[begin : begin + batch], rows.y[begin : begin + batch]
            calls.clear()
            with torch.enable_grad():
                logits = in_full(module(x))
                labels = y if fisher == "empirical" else sample_labels(logits.detach(), generator)
                loss = F.cross_entropy(logits, labels, reduction="sum")  # a sum, so that each row's gradient is its own
                grads = torch.autograd.grad(loss, [c.probe for c in calls], materialize_grads=True)
            for block in blocks:
                mine = [(c, g) for c, g in zip(calls, grads, strict=True) if c.block is block]
                _add(sums[block.layer.name], mine, len(x))
    return {layer: (A / len(rows), B / len(rows)) for layer, (A, B) in sums.items()}


def _zeros(block: Block, forms: Mapping[str, Form], device: torch.device) -> Factors:
    inn, out = (torch.zeros(block.groups, d, d, dtype=torch.float64, device=device) for d in block.sizes(forms))
    return inn, out


def sample_labels(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """A label for each row, drawn from the network's own answer: the Fisher information proper."""
    probabilities = logits.softmax(-1).cpu()
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)


@dataclass(frozen=True, slots=True, eq=False)
class _LayerCall:
    """One use of a layer in a forward pass; the gradient at the probe is the gradient at the layer's output."""

    block: Block
    module: nn.Module
    x: Tensor
    probe: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _RecordCall:
    """A forward hook that notes a layer's input and adds a probe of zeros to its output.

    The probe also shields the gradient from whatever is done to the output in place, and gives it a graph even where
    no weight asks for one.
    """

    block: Block
    calls: list[_LayerCall]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        probe = torch.zeros_like(output, requires_grad=True)
        x = args[0] if args else kwargs["input"]
        self.calls.append(_LayerCall(self.block, module, x.detach(), probe))
        return output + probe


@contextmanager
def _record_calls(module: nn.Module, blocks: Sequence[Block]) -> Iterator[list[_LayerCall]]:
    """The list into which every use of these layers is written."""
    calls: list[_LayerCall] = []
    handles = []
    try:
        for block in blocks:
            part = module.get_submodule(block.layer.weight.rpartition(".")[0])
            handles.append(part.register_forward_hook(_RecordCall(block, calls), with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _add(sums: Factors, calls: Sequence[tuple[_LayerCall, Tensor]], examples: int) -> None:
    """Add one batch to a layer's sums: Σ a aᵀ / S² and S Σ g gᵀ."""
    outs = [output_moments(c.module, grad) for c, grad in calls]
    positions = sum(columns for _, columns in outs) / examples
    for (call, _), (moments, _) in zip(calls, outs, strict=True):
        sums[0].add_(input_moments(call.module, call.x), alpha=1 / positions**2)
        sums[1].add_(moments, alpha=positions)


@dataclass(frozen=True, slots=True)
class _UnpackedFactors(Mapping[str, Factors]):
    """Factors by layer, unpacked from their triangles at every access and not kept."""

    notes: Params
    layers: tuple[str, ...]

    def __getitem__(self, layer: str) -> Factors:
        if layer not in self.layers:
            raise KeyError(layer)
        return unpack_triangle(self.notes[f"kron/{layer}/in"]), unpack_triangle(self.notes[f"kron/{layer}/out"])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def unpack_triangle(triangle: Tensor) -> Tensor:
    """The symmetric matrix of a packed triangle, or the stack of them, whatever their size."""
    return unpack(triangle, (math.isqrt(8 * triangle.shape[-1] + 1) - 1) // 2)


def layers_in(notes: Params, kind: str = "kron/") -> tuple[str, ...]:
    """The layers whose factors stand in these notes."""
    return tuple(n.removeprefix(kind).removesuffix("/in") for n in notes if n.startswith(kind) and n.endswith("/in"))


@dataclass(frozen=True, slots=True)
class KroneckerFactors:
    """The raw factors A and B of every linear and convolution layer, as upper triangles in float32.

    Damping is left to whoever fuses, so that comparing dampings and solvers asks clients nothing new. A grouped
    convolution sends one pair per group, stacked. Norms, embeddings and tied weights have no factors.

    Attributes:
        fisher: "empirical" takes the rows' own labels, "sampled" draws labels from the network's answer.
        choose: also send the damping that the client's own rows prefer (see `marginal`).
        batch: rows per pass.
    """

    fisher: Fisher = "empirical"
    choose: bool = False
    batch: int = 128
    name: ClassVar[str] = "kron"
    reveals: ClassVar[str] = "second moments of every layer's inputs and gradients, averaged over the client's rows"

    def __call__(self, local: Local) -> Params:
        """One pass over the rows with the trained weights."""
        blocks, draw = blocks_of(local.brief.spec), local.stream("fisher")
        options = {"fisher": self.fisher, "batch": self.batch, "generator": draw}
        found = kronecker_factors(local.module, blocks, local.rows, **options)  # type: ignore[arg-type]
        factors = {layer: (_narrow(A), _narrow(B)) for layer, (A, B) in found.items()}
        notes = {}
        for layer, pair in factors.items():
            for side, matrix in zip(("in", "out"), pair, strict=True):
                triangles = pack(matrix).cpu()
                notes[f"kron/{layer}/{side}"] = triangles[0] if len(triangles) == 1 else triangles
        return notes | (_preferred_damping(local, blocks, factors) if self.choose else {})

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """Two triangles per layer."""
        forms, wanted = forms_of(brief.params), {}
        for block in blocks_of(brief.spec):
            many = (block.groups,) if block.groups > 1 else ()
            for side, size in zip(("in", "out"), block.sizes(forms), strict=True):
                wanted[f"kron/{block.layer.name}/{side}"] = Form((*many, packed_size(size)), torch.float32)
        chosen = {f"kron/{what}": Form((3,), torch.float64) for what in ("damping", "evidence")}
        return wanted | (chosen if self.choose else {})

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Factors are positive semi-definite with a bounded trace; a chosen damping is positive."""
        for name in (f"kron/{layer}/{side}" for layer in layers_in(notes) for side in ("in", "out")):
            matrices = unpack_triangle(notes[name])
            for matrix in matrices.unsqueeze(0) if matrices.ndim == 2 else matrices:
                if not 0 <= (trace := float(matrix.double().trace())) <= _MAX_TRACE:
                    return Flaw(name, f"a trace of {trace:.3g}", f"a trace from 0 to {_MAX_TRACE:g}")
                if not is_psd(matrix):
                    return Flaw(name, "not positive semi-definite", "a matrix without negative eigenvalues")
        if self.choose and bool((notes["kron/damping"] <= 0).any()):
            return Flaw("kron/damping", notes["kron/damping"].tolist(), "numbers above 0")
        return None

    def geometry(self, notes: Params) -> Geometry | None:
        """Raw Kronecker factors per layer, fetched and unpacked when asked for."""
        return Kron(_UnpackedFactors(notes, layers_in(notes)))


def _narrow(factor: Tensor) -> Tensor:
    """The factor as it travels: in float32, and zero where it is too small to be told from that."""
    present = factor.abs().amax((-2, -1), keepdim=True) >= _LEAST
    return torch.where(present, factor, 0.0).float()


def _preferred_damping(local: Local, blocks: Sequence[Block], factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """The damping that the marginal likelihood prefers, and that likelihood, for every way of splitting it."""
    now = {n: t.detach() for n, t in local.module.state_dict().items()}
    beliefs = [
        LayerBelief.of(A, B, new - old)
        for block in blocks
        for A, B, new, old in zip(
            *factors[block.layer.name],
            block.matrices(now).double(),
            block.matrices(dict(local.brief.params)).double().to(local.settings.device),
            strict=True,
        )
    ]
    damping, evidence = best_damping(beliefs, len(local.rows))
    return {"kron/damping": damping, "kron/evidence": evidence}
