"""A network's linear layer by name, by default its last one, and the sums of what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.inputs import as_read
from fedfuse.core.messages import Form, Start
from fedfuse.core.model import Single, outputs
from fedfuse.core.params import Layer, Layout, Params
from fedfuse.core.posterior import Kron, Posterior
from fedfuse.core.rng import stream
from fedfuse.core.spec import Spec
from fedfuse.core.state import representation
from fedfuse.errors import ConfigError, RecipeError, suggest
from fedfuse.linalg.factor import dense
from fedfuse.linalg.psd import inverse, pack, packed_size, solve, unpack
from fedfuse.linalg.ridge import Sums
from fedfuse.nets.kronecker import Block, mixing_blocks
from fedfuse.tasks import CLASSIFICATION, Task

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


def total_sums(clients: Iterable[Params]) -> Sums:
    """The sums of all clients, added in their order while the triangles are packed: memory for one client at a time."""
    total: dict[str, Tensor] = {}
    for notes in clients:
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


TURN = "turn"  # the kind of server memory that says how many layers are done


def block_in_turn(spec: Spec, memory: Params, head: str = "") -> Block | None:
    """The layer that is fitted next, in the order in which the network names its layers; None for the head.

    Args:
        spec: the network.
        memory: what the server publishes.
        head: the linear layer that comes last, by name; by default the last linear one.

    Example:
        >>> import torch
        >>> net = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> block_in_turn(net, {}).name, block_in_turn(net, {f"{TURN}/done": torch.tensor(1)})
        ('fc1', None)
    """
    below = _below(spec, head)
    done = turns_done(memory)
    return below[done] if done < len(below) else None


def turns_done(memory: Params) -> int:
    """How many layers are done."""
    return int(memory[f"{TURN}/done"]) if f"{TURN}/done" in memory else 0


def count_turns(network: Spec, layer: str = "") -> int:
    """How many exchanges it takes: one for every layer that mixes what it reads, the head last.

    Example:
        >>> count_turns(Spec("lenet"))
        5
    """
    return len(_below(network, layer)) + 1


def _below(spec: Spec, head: str) -> list[Block]:
    last = linear_layer(spec.layout, head).weight
    return [block for block in mixing_blocks(spec) if block.weight != last]


def with_outputs(start: Start, count: int, seed: int) -> Start:
    """The same network with this many outputs: new ones are drawn as PyTorch draws a linear layer, others cut off.

    The last linear layer is taken for the classifier, as in every network of `fedfuse.models`. A network that has the
    right number already is returned as it is.

    Example:
        >>> from fedfuse.core.spec import Spec
        >>> spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> wide = with_outputs(Start(spec, spec.build().state_dict()), 3, seed=0)
        >>> wide.spec.build().classifier
        Linear(in_features=3, out_features=3, bias=True)
    """
    linear = [layer for layer in start.spec.layout.layers if layer.kind == "linear"]
    if not linear:
        raise ConfigError(f"model {start.spec.factory!r} has no linear layer at its end, so its outputs cannot change")
    last, params, draw = linear[-1], dict(start.params), stream(seed, "outputs")
    have, reads = params[last.weight].shape
    if have == count:
        return start
    for name in filter(None, (last.weight, last.bias)):
        old = params[name]
        bound = reads**-0.5
        fresh = torch.rand(max(0, count - have), *old.shape[1:], generator=draw).mul(2 * bound).sub(bound)
        params[name] = torch.cat([old[:count], fresh.to(old)])
    return Start(start.spec.with_shapes_of(params), params)


@dataclass(frozen=True, slots=True)
class UnknownClass:
    """One output more than there are classes, the last one: it means "none of them".

    Example:
        >>> from fedfuse.core.spec import Spec
        >>> spec = Spec("mlp", {"inputs": 4, "classes": 2})
        >>> outputs(UnknownClass()(Single.of(spec.build(), spec), classes=2, seed=0))
        3
    """

    needs_classes: ClassVar[bool] = True

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:  # noqa: ARG002
        """The network with the output; where the number of classes is not known, one that was resized has it."""
        have = outputs(start) or 0
        wanted = classes + 1 if classes else have if start.spec.surgery else have + 1
        spec, params = with_outputs(Start(start.spec, start.posterior.mean), wanted, seed)
        return start if spec is start.spec else Single(spec, Posterior(params))

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:
        """The output that means "none of them", in addition to one for each class."""
        linear = [forms[layer.weight].shape[0] for layer in layout.layers if layer.kind == "linear"]
        if classes and linear and linear[-1] == classes + 1:
            return None
        return 'an output that means "none of the classes" beside one for each class'
