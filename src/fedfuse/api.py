"""The Python interface: train at a site, fuse anywhere, with files or without."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from fedfuse.client.work import client_round
from fedfuse.core.messages import Brief
from fedfuse.core.model import Model, Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods, find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings, checked
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.admit import Rules
from fedfuse.server.gather import Item, gather
from fedfuse.server.guard import Guard, Guarded
from fedfuse.server.loop import check_quorum
from fedfuse.wire.codec import decode, encode, read, write
from fedfuse.wire.files import save_model

Source: TypeAlias = "Update | str | Path | Mapping[str, Tensor] | nn.Module"


def methods() -> tuple[str, ...]:
    """The names of all methods.

    Example:
        >>> "fedavg" in methods()
        True
    """
    return tuple(all_methods())


def method(name: str, **options: object) -> Recipe:
    """A method's recipe with these options.

    Example:
        >>> method("fedprox", mu=0.1).label
        'fedprox(mu=0.1)'
    """
    return find_method(name).recipe(**options)


@dataclass(frozen=True, slots=True)
class Update:
    """What a site brings: its trained weights and evidence, as one message."""

    client: str
    payload: bytes = field(repr=False)
    reveals: tuple[str, ...] = ()

    @property
    def mass(self) -> float:
        """How many examples stand behind it."""
        return float(decode(self.payload).header["mass"])

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights."""
        return {n: t.clone() for n, t in decode(self.payload).tensors.items() if not n.startswith("~")}

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file that `fuse` reads anywhere."""
        packet = decode(self.payload)
        write(Path(path), packet.tensors, packet.header)
        return Path(path)


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
        module = _one(self.model).spec.build() if like is None else like
        module.load_state_dict(self.state_dict())
        return module.eval()

    def logits(self, x: Tensor) -> Tensor:
        """The fused model's answer."""
        if not hasattr(self.model, "logits"):
            raise RecipeError("models that stay apart have no common answer; ask each of model.members")
        return self.model.logits(x)

    def save(self, path: str | Path) -> Path:
        """Write one file; a single network's loads with plain safetensors into your own model."""
        save_model(self.model, Path(path), {"refused": [dict(r) for r in self.refused]})
        return Path(path)


def local_update(
    model: nn.Module | Spec,
    rows: Rows | tuple[Tensor, Tensor],
    recipe: Recipe | str = "fedavg",
    *,
    client: str = "site",
    start: str | Path | Mapping[str, Tensor] | None = None,
    classes: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Update:
    """Train at a site and bring the evidence a method asks for.

    Args:
        model: the network; its present weights are the start unless `start` is given.
        rows: the site's inputs and labels.
        recipe: the method, or its name.
        client: the site's name.
        start: common weights to start from, as a state dict or a safetensors file.
        classes: how many classes there are in all; by default the labels' largest + 1.
        seed: fixes every random draw.
        settings: of local training, as in a config file: epochs, batch_size, optimizer, …; `lr` and `momentum`
            are short for the optimizer's.

    Example:
        >>> import torch
        >>> rows = (torch.randn(20, 4), torch.arange(20) % 2)
        >>> local_update(torch.nn.Linear(4, 2), rows, epochs=2, lr=0.1).mass
        20.0
    """
    recipe = method(recipe) if isinstance(recipe, str) else recipe
    spec = model if isinstance(model, Spec) else Spec.of(model)
    data = rows if isinstance(rows, Rows) else Rows(*rows)
    module = spec.build() if isinstance(model, Spec) else model
    begin = _start(start) if start is not None else {n: t.detach().clone() for n, t in module.state_dict().items()}
    count = classes if classes is not None else int(data.y.max()) + 1 if len(data) else 0
    brief = Brief(0, spec, begin, classes=count)
    answer = client_round(recipe.work(_settings(settings)), brief, client, data, seed=seed)
    packet = decode(answer.payload)
    header = {**packet.header, "client": client, "start": fingerprint(begin), "classes": count}
    header |= {"reveals": list(recipe.reveals), "method": recipe.label or recipe.name}
    return Update(client, encode(packet.tensors, header), recipe.reveals)


def fuse(
    updates: Sequence[Source],
    recipe: Recipe | str = "fedavg",
    *,
    masses: Sequence[float] | None = None,
    start: str | Path | Mapping[str, Tensor] | None = None,
    model: nn.Module | Spec | None = None,
    server_rows: Rows | tuple[Tensor, Tensor] | None = None,
    guard: Guard | None = None,
    quorum: float = 0.5,
    seed: int = 0,
) -> Fused:
    """Fuse what sites brought: updates, files, modules or plain state dicts.

    The layout most of them share is the contract; the odd ones are refused by name and the others fused.

    Args:
        updates: what to fuse.
        recipe: the method, or its name.
        masses: examples behind each one; needed for state dicts unless all weigh alike, else read from the update.
        start: the common weights they started from, for methods that need them.
        model: the network the weights belong to; needed for state dicts where the result must be run.
        server_rows: labelled rows the server holds, for methods that need them.
        guard: a robust filter before the aggregator.
        quorum: the share of sources that must be admitted.
        seed: fixes every random draw of the server.

    Raises:
        QuorumLost: if too few were admitted.
        ConfigError: if no layout has a majority, or there is nothing to fuse.

    Example:
        >>> import torch
        >>> fuse([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], "fedavg", masses=[1, 3]).state_dict()
        {'w': tensor([0.7500])}
    """
    recipe = method(recipe) if isinstance(recipe, str) else recipe
    recipe = recipe if guard is None else replace(recipe, aggregate=Guarded(guard, recipe.aggregate))
    spec = model if isinstance(model, Spec) or model is None else Spec.of(model)
    items = _items(updates, masses)
    begin = None if start is None else _start(start)
    if "start" in recipe.needs and begin is None:
        raise RecipeError(f"method {recipe.name!r} needs the weights the sites started from; pass `start`")
    bench = Bench(rows=_rows(server_rows), population=len(items), seed=seed)
    recipe.check(1, bench)
    trusted = frozenset() if spec is None else frozenset({spec.factory})
    admission, brief = gather(items, recipe.evidence, begin, spec, Rules(quorum=quorum, trusted=trusted))
    check_quorum(admission, tuple(i.client for i in items), quorum, 0)
    first = Single(brief.spec, Posterior(brief.params))
    state = ServerState(0, first)
    bench = replace(bench, classes=brief.classes)
    state = recipe.aggregate(admission.cohort, state, bench)
    for step in recipe.steps:
        state = step(state, admission.cohort, bench)
    return Fused(state.model, tuple(admission.refused), state.facts)


def fingerprint(params: Params) -> str:
    """A short name for a set of weights, equal for equal weights."""
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(f"{name}{tuple(params[name].shape)}".encode())
        digest.update(encode({"": params[name]}, {}))
    return digest.hexdigest()[:16]


def _items(updates: Sequence[Source], masses: Sequence[float] | None) -> list[Item]:
    if not updates:
        raise ConfigError("there is nothing to fuse: pass at least one update, file or state dict")
    if masses is not None and len(masses) != len(updates):
        raise ConfigError(f"{len(masses)} masses were given for {len(updates)} updates; give one each")
    given = list(masses) if masses is not None else [None] * len(updates)
    items = [_item(u, place, mass) for place, (u, mass) in enumerate(zip(updates, given, strict=True), 1)]
    seen: dict[str, int] = {}
    for place, item in enumerate(items):  # two files of one name are still two sites
        seen[item.client] = seen.get(item.client, 0) + 1
        if seen[item.client] > 1:
            items[place] = replace(item, client=f"{item.client} ({seen[item.client]})")
    return items


def _item(source: Source, place: int, mass: float | None) -> Item:
    match source:
        case Update():
            return Item(source.client, source.payload, mass)
        case str() | Path():
            return Item(Path(source).stem, Path(source), mass)
        case nn.Module():
            return Item(f"model-{place}", encode(source.state_dict(), {}), mass)
        case Mapping():
            return Item(f"model-{place}", encode(source, {}), mass)
    raise ConfigError(f"update {place} is a {type(source).__name__}; expected an update, a file or a state dict")


def _start(source: str | Path | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(source, str | Path):
        return {n: t for n, t in read(Path(source)).tensors.items() if not n.startswith("~")}
    return dict(source)


def _rows(rows: Rows | tuple[Tensor, Tensor] | None) -> Rows | None:
    return rows if rows is None or isinstance(rows, Rows) else Rows(*rows)


def _settings(given: Mapping[str, Any]) -> LocalSettings:
    short = {k: given[k] for k in ("lr", "momentum", "weight_decay") if k in given}
    rest = {k: v for k, v in given.items() if k not in short}
    return checked(LocalSettings, rest | ({"optimizer": {**rest.get("optimizer", {}), **short}} if short else {}))


def _one(model: Model) -> Single:
    if not isinstance(model, Single):
        kind = type(model).__name__.lower()
        raise RecipeError(f"the result is a {kind} of networks, not one; save it, ask its logits, or distil it")
    return model
