"""A network with another number of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfuse.core.messages import Form, Start
from fedfuse.core.model import Single, outputs
from fedfuse.core.params import Layout
from fedfuse.core.posterior import Posterior
from fedfuse.core.rng import stream
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, Task


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
        """The network with the output; where the number of classes is not told, one that was resized has it."""
        have = outputs(start) or 0
        wanted = classes + 1 if classes else have if start.spec.surgery else have + 1
        spec, params = with_outputs(Start(start.spec, start.posterior.mean), wanted, seed)
        return start if spec is start.spec else Single(spec, Posterior(params))

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:
        """The output that means "none of them", beside one for each class."""
        linear = [forms[layer.weight].shape[0] for layer in layout.layers if layer.kind == "linear"]
        if classes and linear and linear[-1] == classes + 1:
            return None
        return 'an output that means "none of the classes" beside one for each class'
