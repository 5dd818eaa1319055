"""Words of others, such as names of classes and sites, in files that programs interpret."""

from __future__ import annotations

import math
import re
from html import escape

from fedfuse.errors import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_MARKS = re.compile(r"[\\`*{}\[\]#|~$!]|(?<![^\W_])_|_(?![^\W_])")


def spreadsheet_cell(words: str) -> str:
    """Words that no spreadsheet takes for a formula: an apostrophe before them where it would; numbers stay.

    Example:
        >>> spreadsheet_cell("=HYPERLINK(A1)"), spreadsheet_cell("ill"), spreadsheet_cell("-1.5")
        ("'=HYPERLINK(A1)", 'ill', '-1.5')
    """
    return f"'{words}" if words.lstrip(" ").startswith(_FORMULA) and not _is_number(words) else words


def _is_number(words: str) -> bool:
    try:
        return math.isfinite(float(words))
    except ValueError:
        return False


def markdown_text(words: str) -> str:
    r"""Words that Markdown shows as they are, in one line: no HTML, link, picture or cell of a table begins in them.

    Example:
        >>> markdown_text("<b> a|b ![x](http://y) task_arithmetic")
        '&lt;b&gt; a\\|b \\!\\[x\\](http&#58;//y) task_arithmetic'
    """
    plain = _MARKS.sub(r"\\\g<0>", printable(words))
    return escape(plain, quote=False).replace("://", "&#58;//")
