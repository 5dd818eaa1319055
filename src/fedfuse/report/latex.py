"""Text and numbers as LaTeX prints them: every character that means something to TeX escaped."""

from __future__ import annotations

import unicodedata

from fedfuse.report.svg import legible
from fedfuse.report.tables import Cell

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "–": "--",
    "±": r"\ensuremath{\pm}",
    "×": r"\ensuremath{\times}",
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
    "∞": r"\ensuremath{\infty}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}
_LATIN = dict(zip("ΑΒΕΖΗΙΚΜΝΟΡΤΧ", "ABEZHIKMNOPTX", strict=True))


def latex_text(text: str) -> str:
    r"""Words for LaTeX.

    Example:
        >>> print(latex_text("fedprox(mu=0.1) & 5 %_{α}"))
        fedprox(mu=0.1) \& 5 \%\_\{\ensuremath{\alpha}\}
    """
    return "".join(_SPECIAL.get(letter) or _greek(letter) or _plain(letter) for letter in legible(text))


def latex_cell(cell: Cell) -> str:
    r"""A number with its spread: bold where best, underlined where tied.

    Example:
        >>> print(latex_cell(Cell("1,234.5", "± 2.0", mark="best")))
        $\mathbf{1{,}234.5 \pm 2.0}$
    """
    if cell.value is None and cell.mean == "–":
        return "--"
    inside = f"{latex_number(cell.mean)} \\pm {latex_number(spread)}" if (spread := cell.sd.strip(" ±")) else ""
    inside = inside or latex_number(cell.mean)
    shown = {"best": f"$\\mathbf{{{inside}}}$", "tie": f"\\underline{{${inside}$}}", "": f"${inside}$"}[cell.mark]
    return f"{shown} {latex_text(cell.of)}" if cell.of else shown


def latex_number(number: str) -> str:
    """A number whose separators of thousands take no extra room."""
    return number.replace(",", "{,}")


def _greek(letter: str) -> str:
    """A Greek letter as a command, nothing for any other; capitals that look Latin are Latin."""
    name = unicodedata.name(letter, "")
    if not name.startswith("GREEK ") or " LETTER " not in name or " WITH " in name:
        return ""
    size, _, word = name.removeprefix("GREEK ").lower().partition(" letter ")
    word = {"lamda": "lambda", "final sigma": "varsigma"}.get(word, word)
    if size == "capital" and letter in _LATIN:
        return _LATIN[letter]
    return "o" if word == "omicron" else f"\\ensuremath{{\\{word.capitalize() if size == 'capital' else word}}}"


def _plain(letter: str) -> str:
    """A letter that LaTeX has by itself: those of Europe stay, others lose what makes them special."""
    if ord(letter) < 0x250:
        return letter
    return unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode() or "?"
