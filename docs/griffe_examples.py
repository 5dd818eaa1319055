"""Griffe reads "Examples:" as code that was run; our docstrings say "Example:", for most have one."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneExample(griffe.Extension):
    """Read "Example:" as "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the heading in an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
