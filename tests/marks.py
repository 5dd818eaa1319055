"""Parts of documents that are written by a program, between marks a reader does not see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def between(text: str, mark: str) -> str:
    """What stands between a pair of marks."""
    return text.partition(f"<!-- {mark} -->")[2].partition(f"<!-- /{mark} -->")[0].strip()


def write_between(page: Path, parts: Mapping[str, str]) -> None:
    """Write the parts of a page anew, each between its marks."""
    text = page.read_text(encoding="utf-8")
    for mark, new in parts.items():
        pattern = re.compile(rf"(<!-- {mark} -->).*?(<!-- /{mark} -->)", re.DOTALL)
        text = pattern.sub(lambda found, new=new: f"{found[1]}{new}{found[2]}", text)
    page.write_text(text, encoding="utf-8")
