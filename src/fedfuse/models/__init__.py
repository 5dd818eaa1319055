"""The networks of the papers, each a plain module of named layers with its widths as options.

Every model takes a batch of images, or of texts as tokens, and gives logits. Its classifier is the last linear layer,
in order of registration and of execution, so the representation of a model is what that layer reads.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_type_hints

from pydantic.fields import FieldInfo
from torch import nn

from fedfuse.core.registry import describe_option, describe_type
from fedfuse.errors import ConfigError
from fedfuse.models.adapted import adapt, build_adapted
from fedfuse.models.bayes import bayesian, build_bayesian
from fedfuse.models.deep import resnet18, resnet50, vgg11, vgg16
from fedfuse.models.layers import add_projection
from fedfuse.models.plain import convnet_ams, convnet_feddu, lenet, mlp
from fedfuse.models.random_features import random_convolution, random_fourier
from fedfuse.models.transformer import text_classifier, transformer

__all__ = [
    "MODELS",
    "WRAPPERS",
    "adapt",
    "add_projection",
    "bayesian",
    "convnet_ams",
    "convnet_feddu",
    "describe_models",
    "lenet",
    "mlp",
    "model_factory",
    "model_names",
    "random_convolution",
    "random_fourier",
    "resnet18",
    "resnet50",
    "text_classifier",
    "transformer",
    "vgg11",
    "vgg16",
]

MODELS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        f.__name__: f
        for f in (
            mlp,
            lenet,
            convnet_ams,
            convnet_feddu,
            vgg11,
            vgg16,
            resnet18,
            resnet50,
            random_convolution,
            random_fourier,
            transformer,
            text_classifier,
        )
    }
)
"""Every network by name."""

WRAPPERS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {"bayesian": build_bayesian, "adapted": build_adapted}
)
"""Networks made of another one, whose spec stands among their options; methods use them, users name the inner one."""


def model_names() -> tuple[str, ...]:
    """The name of every model.

    Example:
        >>> model_names()[:2]
        ('mlp', 'lenet')
    """
    return tuple(MODELS)


def model_factory(name: str) -> Callable[..., nn.Module]:
    """The factory of that name.

    Example:
        >>> model_factory("lenet")(size=8, hidden=(16,)).classifier
        Linear(in_features=16, out_features=10, bias=True)
    """
    if (found := MODELS.get(name) or WRAPPERS.get(name)) is not None:
        return found
    near = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {near[0]}?" if near else "or name your own as package.module:Class"
    raise ConfigError(f"model {name!r:.80} is unknown, expected one of {', '.join(MODELS)}; {hint}")


_FROM_DATA = ("classes", "channels", "size", "inputs", "tokens", "length")  # what an experiment fills in by itself


def describe_models() -> list[dict[str, Any]]:
    """Every network's name, first sentence, documentation and options.

    Example:
        >>> [(o["name"], o["type"], o["default"]) for o in describe_models()[0]["options"]][-1]
        ('output_bias', 'true | false', True)
    """
    described = []
    for name, make in MODELS.items():
        text, hints = inspect.getdoc(make) or "", get_type_hints(make)
        options = [
            {
                "name": p.name,
                "type": describe_type(FieldInfo(annotation=hints[p.name])),
                "default": "from the data" if p.name in _FROM_DATA else p.default,
                "text": describe_option(text, p.name),
            }
            for p in inspect.signature(make).parameters.values()
        ]
        described.append({"name": name, "summary": text.split("\n")[0], "text": text, "options": options})
    return described
