"""Guards and alignments by name, wherever a user names them: a file, the command line, Python or a Flower strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import Alignment, Guard, ServerStep
from fedfuse.core.settings import explain
from fedfuse.errors import ConfigError, check_options, suggest
from fedfuse.server.align.alignment import ALIGNMENTS, AlignUnits, Matching, Reference, TurnedBy
from fedfuse.server.guards import GUARDS, ClientNoise
from fedfuse.server.steps.repair import Repair, RestateNorms

GuardChoice: TypeAlias = "Guard | str | Mapping[str, Any] | None"
AlignChoice: TypeAlias = "Alignment | Matching | str | Mapping[str, Any] | None"


@dataclass(frozen=True, slots=True)
class AlignOptions:
    """Options that every alignment takes in addition to its own.

    Attributes:
        reference: whose places units go to: the "first" client's, the "largest", or the "mean" of the aligned ones.
        renorm: estimate the running statistics of BatchNorm again on the server's rows afterwards.
        repair: rescale hidden units of layers without BatchNorm afterwards to the parents' activation statistics on
            the server's rows.
        stream: also turn residual streams of transformers by orthogonal maps, by "weights" or by "activations"; true
            for weights.
    """

    reference: Reference = "first"
    renorm: bool = False
    repair: bool = False
    stream: bool | TurnedBy = False


def with_filters(recipe: Recipe, *, align: AlignChoice = None, guard: GuardChoice = None) -> Recipe:
    """The recipe behind an alignment and a guard; units are aligned first, for a guard measures distances.

    Args:
        recipe: what fuses.
        align: "weights", "activations", "transport" or "graph"; or a table with the name and options; or one made.
        guard: "clip", "krum", "median", "trimmed" or "private"; or a table with the name and options; or one made.

    Raises:
        ConfigError: for a name or an option that does not exist, with the nearest one that does.

    Example:
        >>> from fedfuse.core.registry import find_method
        >>> behind = with_filters(find_method("fedavg").recipe(), guard={"name": "krum", "byzantine": 2})
        >>> behind.guard, behind.label
        (Krum(byzantine=2, keep=None), 'fedavg+krum')
    """
    if recipe.later is not None:
        after, then = recipe.later
        recipe = replace(recipe, later=(after, with_filters(then, align=align, guard=guard)))
    label = recipe.label or recipe.name
    if guard is not None:
        word, found = find_guard(guard)
        if isinstance(found, ClientNoise):
            found = found.fit_to(recipe)
        label, recipe = f"{label}+{word}", replace(recipe, guard=found)
    if align is not None:
        word, alignment, steps = find_alignment(align)
        label, recipe = f"{label}+{word}", replace(recipe, align=alignment, steps=(*steps, *recipe.steps))
    return replace(recipe, label=label)


def find_guard(choice: Guard | str | Mapping[str, Any]) -> tuple[str, Guard]:
    """A guard's name and the guard itself.

    Example:
        >>> find_guard("median")
        ('median', CoordinateMedian())
    """
    if not isinstance(choice, str | Mapping):
        return _name_of(choice, GUARDS), choice
    name, options = _split("guard", choice, GUARDS)
    check_options(f"guard {name!r}", options, [f.name for f in fields(GUARDS[name])])  # type: ignore[arg-type]
    return name, _build(GUARDS[name], options, f"guard {name}")


def find_alignment(
    choice: Alignment | Matching | str | Mapping[str, Any],
) -> tuple[str, Alignment, tuple[ServerStep, ...]]:
    """An alignment's name, the alignment itself, and the steps that mend the fused model's statistics after it.

    Example:
        >>> find_alignment({"name": "weights", "reference": "mean"})[1].reference
        'mean'
    """
    if isinstance(choice, AlignUnits):
        return _name_of(choice.by, ALIGNMENTS), choice, ()
    if not isinstance(choice, str | Mapping):
        alignment: Any = choice if hasattr(choice, "mixes_networks") else AlignUnits(choice)
        return _name_of(choice, ALIGNMENTS), alignment, ()
    name, options = _split("alignment", choice, ALIGNMENTS)
    own = [f.name for f in fields(ALIGNMENTS[name])]  # type: ignore[arg-type]
    check_options(f"alignment {name!r}", options, [*own, *(f.name for f in fields(AlignOptions))])
    way = _build(ALIGNMENTS[name], {k: v for k, v in options.items() if k in own}, f"alignment {name}")
    rest = _build(AlignOptions, {k: v for k, v in options.items() if k not in own}, f"alignment {name}")
    turned_by: TurnedBy | None = None
    if rest.stream:
        turned_by = "weights" if isinstance(rest.stream, bool) else rest.stream
    steps: tuple[ServerStep, ...] = (RestateNorms(),) * rest.renorm + (Repair(),) * rest.repair
    return name, AlignUnits(way, rest.reference, turned_by), steps


def _split(kind: str, choice: str | Mapping[str, Any], known: Mapping[str, type]) -> tuple[str, dict[str, Any]]:
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = options.pop("name", None)
    if name not in known:
        raise ConfigError(f"there is no {kind} {name!r}{suggest(str(name), known)} there are {', '.join(known)}")
    return str(name), options


def _name_of(part: object, known: Mapping[str, type]) -> str:
    """The name a part is known by, or that of its class."""
    return next((name for name, kind in known.items() if type(part) is kind), type(part).__name__)


def _build(kind: type, options: Mapping[str, Any], whose: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(options)
    except ValidationError as why:
        raise ConfigError(explain(why, BaseModel, whose)) from why
