"""A network's linear layer by name, its last one unless told otherwise, and the sums of what it reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedfuse.core.factor import dense
from fedfuse.core.inputs import as_read
from fedfuse.core.messages import Form
from fedfuse.core.model import Single
from fedfuse.core.params import Layer, Layout, Params
from fedfuse.core.posterior import Kron
from fedfuse.core.state import representation
from fedfuse.core.words import suggest
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.psd import inverse, pack, packed_size, solve, unpack
from fedfuse.linalg.ridge import Sums

KIND = "moments"  # the first part of the notes' names
NUMBERS = "target_squares"


def linear_layer(layout: Layout, name: str = "") -> Layer:
    """A linear layer whose weight is its own: the one of this name, by default the last.

    Raises:
        ConfigError: if there is none, or its weight is tied to another tensor.

    Example:
        >>> from fedfuse.core.spec import Spec
        >>> linear_layer(Spec("lenet").layout).name
        'classifier'
    """
    known = {layer.name: layer for layer in layout.layers if layer.kind == "linear"}
    if not known:
        raise ConfigError("the network has no linear layer to fit; give it a linear classifier")
    if name and name not in known:
        raise ConfigError(f"there is no linear layer {name!r}{suggest(name, known)} known: {', '.join(known)}")
    layer = known[name] if name else list(known.values())[-1]
    if any(layer.weight in same for same in layout.tied):
        raise ConfigError(
            f"layer {layer.name!r} shares its weight with another part of the network, which fitting it would change; "
            "name a layer whose weight is its own, or untie it"
        )
    return layer


def moment_forms(features: int, targets: int, numbers: bool = False) -> dict[str, Form]:
    """The forms of one client's sums: a packed triangle and a table with the constant 1 as last feature; squares.

    Squares of classes are their counts. Those of labels and numbers travel under a name of their own, so that the door
    knows which of both it has to hold them to.
    """
    rows = features + 1
    shapes = {"gram": (packed_size(rows),), "cross": (rows, targets), NUMBERS if numbers else "squares": (targets,)}
    return {f"{KIND}/{part}": Form(shape, torch.float64) for part, shape in shapes.items()}


def moment_notes(sums: Sums, numbers: bool = False) -> dict[str, Tensor]:
    """Sums as they travel: G as its upper triangle, everything in float64. Its last feature is the constant 1."""
    parts = {"gram": pack(sums.gram), "cross": sums.cross, NUMBERS if numbers else "squares": sums.squares}
    return {f"{KIND}/{part}": tensor.cpu() for part, tensor in parts.items()}


def sums_in(notes: Params) -> Sums:
    """The sums of one client's notes; n is the constant's square."""
    cross = notes[f"{KIND}/cross"]
    gram = unpack(notes[f"{KIND}/gram"], len(cross))
    squares = notes[f"{KIND}/{NUMBERS}" if are_numbers(notes) else f"{KIND}/squares"]
    return Sums(gram, cross, squares, float(gram[-1, -1]))


def are_numbers(notes: Params) -> bool:
    """Whether these are sums of labels or numbers, and not of classes."""
    return f"{KIND}/{NUMBERS}" in notes


def total_sums(everybody: Iterable[Params]) -> Sums:
    """The sums of all clients, added in their order while the triangles are packed: memory for one client at a time."""
    total: dict[str, Tensor] = {}
    for notes in everybody:
        for name in (n for n in notes if n.startswith(f"{KIND}/")):
            total[name] = total[name].add_(notes[name]) if name in total else notes[name].clone()
    return sums_in(total)


@torch.no_grad()
def logit_variance(model: Single, x: Tensor) -> Tensor:
    """The variance of every logit under the Kronecker posterior of the last linear layer, rows × outputs.

    With precision B ⊗ A it is φᵀA⁻¹φ · (B⁻¹)_cc for what the layer reads, φ; the layers before count as known. What
    rows scatter by themselves comes on top (the fact `noise` of a ridge regression).

    Raises:
        RecipeError: if the model's last layer has no such posterior.
    """
    layer, geometry = linear_layer(model.spec.layout), model.posterior.geometry
    if not isinstance(geometry, Kron) or layer.name not in geometry.factors:
        raise RecipeError("nothing is known of the last layer's posterior; fuse by ridge or refit, which compute it")
    A, B = (dense(factor) for factor in geometry.factors[layer.name])
    module = model.spec.build().eval()
    module.load_state_dict(dict(model.posterior.mean))
    phi = representation(module, as_read(model.spec, model.spec.cast(x)))[1].double()
    phi = phi if layer.bias is None else torch.cat([phi, phi.new_ones(len(phi), 1)], 1)
    spread = (phi.mT * solve(A, phi.mT, what="the posterior's precision")).sum(0)
    return spread[:, None] * inverse(B).diagonal()
