"""The networks as a person lists them: what each is, and its options."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from pydantic.fields import FieldInfo

from fedfuse.core.registry import describe_option, describe_type
from fedfuse.models import MODELS, model_factory

__all__ = ["FROM_DATA", "describe_models", "model_factory"]

FROM_DATA = ("classes", "channels", "size", "inputs", "tokens", "length")  # what an experiment fills in by itself


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
                "default": "from the data" if p.name in FROM_DATA else p.default,
                "text": describe_option(text, p.name),
            }
            for p in inspect.signature(make).parameters.values()
        ]
        described.append({"name": name, "summary": text.split("\n")[0], "text": text, "options": options})
    return described
