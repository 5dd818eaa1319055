"""Anywhere: fuse what sites brought, with files or without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from fedfuse.api.runs import recipe as make_recipe
from fedfuse.api.update import Update, check_honoured, prepared_start, start_of
from fedfuse.core.model import Answering, Model, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.seams import AsChosen
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.door.admit import Rules
from fedfuse.server.door.files import Item, gather
from fedfuse.server.filters import AlignChoice, GuardChoice, with_filters
from fedfuse.server.round import fuse_round
from fedfuse.wire.codec import encode
from fedfuse.wire.files import save_model

if TYPE_CHECKING:
    pass

Source: TypeAlias = "Update | str | Path | Mapping[str, Tensor] | nn.Module"


@dataclass(frozen=True, slots=True)
class Fused:
    """The result of a fusion: the model, who was refused and why, and what the aggregator noted."""

    model: Model
    refused: tuple[Mapping[str, str], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Tensor]:
        """The fused weights under their plain names."""
        return dict(_one(self.model).posterior.mean)

    def module(self, like: nn.Module | None = None) -> nn.Module:
        """A network with the fused weights: a new one, or the given one filled in."""
        module = _runnable(_one(self.model)).spec.build() if like is None else like
        module.load_state_dict(self.state_dict())
        return module.eval()

    def logits(self, x: Tensor) -> Tensor:
        """The fused model's answer."""
        if not isinstance(self.model, Answering):
            raise RecipeError("models that stay apart have no common answer; ask each of model.members")
        for member in self.model.members:
            _runnable(member)
        return self.model.logits(x)

    def save(self, path: str | Path) -> Path:
        """Write one file; a single network's loads with plain safetensors into your own model."""
        save_model(self.model, Path(path), {"refused": [dict(r) for r in self.refused]})
        return Path(path)


def fuse(
    updates: Sequence[Source],
    recipe: Recipe | str = "fedavg",
    *,
    num_examples: Sequence[float] | None = None,
    start: str | Path | Mapping[str, Tensor] | None = None,
    model: nn.Module | Spec | Sequence[nn.Module | Spec] | None = None,
    server_rows: Rows | tuple[Tensor, Tensor] | None = None,
    unlabelled: Tensor | None = None,
    guard: GuardChoice = None,
    align: AlignChoice = None,
    quorum: float = 0.5,
    seed: int = 0,
) -> Fused:
    """Fuse what sites brought: updates, files, modules or plain state dicts.

    The layout most of them share is the contract; the odd ones are refused by name and the others fused.

    Args:
        updates: what to fuse.
        recipe: the method, or its name.
        num_examples: behind each one; needed for state dicts unless all weigh alike, else read from the update.
        start: the common weights they started from, for methods that need them.
        model: the network the weights belong to, or several; needed where a network that is not fedfuse's own must
            be run: to answer together, to be aligned, distilled or pruned. Nothing that files name is run unasked.
        server_rows: labelled rows the server holds, for methods that need them.
        unlabelled: inputs without labels the server holds, for distillation.
        guard: a robust filter before the aggregator: "clip", "krum", "median", "trimmed", or a table with the name
            and options, such as {"name": "krum", "byzantine": 2}.
        align: how hidden units are moved to common places before anything else: "weights", "activations",
            "transport", "graph", or a table with the name and options.
        quorum: the share of sources that must be admitted.
        seed: fixes every random draw of the server.

    Raises:
        QuorumLost: if too few were admitted, or no layout is shared by more than half of them.
        ConfigError: if there is nothing to fuse, or it does not fit the network or the start that was named.

    Example:
        >>> import torch
        >>> fuse([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], "fedavg", num_examples=[1, 3]).state_dict()
        {'w': tensor([0.7500])}
    """
    recipe = with_filters(make_recipe(recipe) if isinstance(recipe, str) else recipe, align=align, guard=guard)
    check_honoured(recipe, "fusing files")
    items = _items(updates, num_examples)
    begin = None if start is None else start_of(start)[1]
    if "start" in recipe.needs and begin is None:
        raise RecipeError(f"method {recipe.name!r} needs the weights the sites started from; pass `start`")
    bench = Bench(rows=_rows(server_rows), unlabelled=unlabelled, population=len(items), seed=seed)
    recipe.check(1, bench)
    named = [_prepared_spec(recipe, given, seed) for given in _several(model)]
    admission, brief = gather(items, recipe, begin, named, Rules(quorum=quorum))
    state = ServerState(brief.round, Single(brief.spec, Posterior(brief.params)))
    bench = replace(bench, classes=brief.classes)
    recipe.check(1, bench, state if brief.spec.can_run else None)
    state = fuse_round(recipe, admission.cohort, state, bench)
    return Fused(state.model, tuple(admission.refused), state.facts)


def _several(model: nn.Module | Spec | Sequence[nn.Module | Spec] | None) -> list[nn.Module | Spec]:
    if model is None:
        return []
    return [model] if isinstance(model, nn.Module | Spec) else list(model)


def _prepared_spec(recipe: Recipe, given: nn.Module | Spec, seed: int) -> Spec:
    """The network the method trains, made of one the user named; options may come with the updates, if it has none."""
    spec = given if isinstance(given, Spec) else Spec.of(given)
    if isinstance(recipe.prepare_model, AsChosen):
        return spec
    return prepared_start(recipe, spec, spec.skeleton().state_dict(), 0, seed).spec


def _items(updates: Sequence[Source], num_examples: Sequence[float] | None) -> list[Item]:
    if not updates:
        raise ConfigError("there is nothing to fuse: pass at least one update, file or state dict")
    if num_examples is not None and len(num_examples) != len(updates):
        raise ConfigError(
            f"{len(num_examples)} numbers of examples were given for {len(updates)} updates; give one each"
        )
    given = list(num_examples) if num_examples is not None else [None] * len(updates)
    items = [
        _item(u, place, num_examples) for place, (u, num_examples) in enumerate(zip(updates, given, strict=True), 1)
    ]
    names = Counter(item.client for item in items)
    items = [_by_path(item) if names[item.client] > 1 else item for item in items]
    names = Counter(item.client for item in items)
    return [
        replace(item, client=f"{item.client} ({place})") if names[item.client] > 1 else item
        for place, item in enumerate(items, 1)  # one file twice, or two updates of one name, are still two
    ]


def _by_path(item: Item) -> Item:
    """A file is called by its stem, and by its path where others have the same stem."""
    return replace(item, client=str(item.payload)) if isinstance(item.payload, Path) else item


def _item(source: Source, place: int, num_examples: float | None) -> Item:
    match source:
        case Update():
            return Item(source.client, source.payload, num_examples, source.spec)
        case str() | Path():
            return Item(Path(source).stem, Path(source), num_examples)
        case nn.Module():
            return Item(f"model-{place}", encode(source.state_dict(), {}), num_examples)
        case Mapping():
            return Item(f"model-{place}", encode(source, {}), num_examples)
    raise ConfigError(f"update {place} is a {type(source).__name__}; expected an update, a file or a state dict")


def _rows(rows: Rows | tuple[Tensor, Tensor] | None) -> Rows | None:
    return rows if rows is None or isinstance(rows, Rows) else Rows(*rows)


def _one(model: Model) -> Single:
    if not isinstance(model, Single):
        kind = type(model).__name__.lower()
        raise RecipeError(f"the result is a {kind} of networks, not one; save it, ask its logits, or distil it")
    return model


def _runnable(model: Single) -> Single:
    if not model.spec.can_run:
        raise RecipeError(
            f"only the description of {model.spec.factory!r} is here; pass model= to `fuse` to run what was fused, or "
            "fill a network of yours: fused.module(like=network)"
        )
    return model
