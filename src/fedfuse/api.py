"""The Python interface: train at a site, fuse anywhere, with files or without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from fedfuse.client.work import client_round
from fedfuse.core.description import describe
from fedfuse.core.messages import Brief
from fedfuse.core.model import Model, Single, networks, outputs
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods, find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import AsItIs, ClientsOnly, Plain, Work
from fedfuse.core.settings import LocalSettings, checked
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.core.threads import one_thread
from fedfuse.engines.base import heard
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.admit import Rules
from fedfuse.server.filters import AlignChoice, GuardChoice, with_filters
from fedfuse.server.gather import Item, fingerprint, first_difference, gather
from fedfuse.server.round import fuse_round
from fedfuse.wire.codec import Malformed, decode, encode, forms_of, read, write
from fedfuse.wire.files import save_model
from fedfuse.wire.messages import NOTE, encode_brief

if TYPE_CHECKING:
    from fedfuse.experiment.execute import Results

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
    spec: Spec | None = field(default=None, repr=False, compare=False)

    @property
    def mass(self) -> float:
        """How many examples stand behind it."""
        return float(decode(self.payload).header["mass"])

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights."""
        return {n: t.clone() for n, t in decode(self.payload).tensors.items() if not n.startswith(NOTE)}

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
        module = _runnable(_one(self.model)).spec.build() if like is None else like
        module.load_state_dict(self.state_dict())
        return module.eval()

    def logits(self, x: Tensor) -> Tensor:
        """The fused model's answer."""
        if not hasattr(self.model, "logits"):
            raise RecipeError("models that stay apart have no common answer; ask each of model.members")
        for member in networks(self.model):
            _runnable(member)
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
        classes: how many classes there are in all; by default as many as the network has outputs.
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
    _check_honoured(recipe, "a site that only brings a file")
    spec = model if isinstance(model, Spec) else Spec.of(model)
    data = rows if isinstance(rows, Rows) else Rows(*rows)
    module = spec.build() if isinstance(model, Spec) else model
    begin = _start(start) if start is not None else {n: t.detach().clone() for n, t in module.state_dict().items()}
    count = _count_classes(classes, Single.of(module, spec), data)
    first = _dressed(recipe, spec, begin, count, seed)
    _check_fit(first)
    brief = Brief(0, first.spec, first.posterior.mean, classes=count)
    packet = decode(_answer(recipe.work(_settings(settings)), brief, client, data, seed))
    header = {**packet.header, "client": client, "start": fingerprint(brief.params), "classes": count}
    header |= {"layout": describe(first.spec.layout), "inputs": list(data.x.shape[1:])}
    header |= {"reveals": list(recipe.reveals), "method": recipe.label or recipe.name}
    return Update(client, encode(packet.tensors, header), recipe.reveals, first.spec)


def _answer(work: Work, brief: Brief, client: str, rows: Rows, seed: int) -> bytes:
    """A client's reply as every engine brings it: everything comes from bytes, and one thread does it."""
    with one_thread():
        told = heard(encode_brief(brief), brief.spec)
        return client_round(work, told, client, Rows(rows.x.contiguous(), rows.y), seed=seed).payload


def _count_classes(given: int | None, network: Single, rows: Rows) -> int:
    """How many classes there are: as the user says, else as many as the network has outputs or the rows have labels."""
    seen = int(rows.y.max()) + 1 if len(rows) else 0
    count = given if given is not None else max(seen, outputs(network) or 0)
    if seen > count:
        raise ConfigError(f"the rows have the label {seen - 1} and there are {count} classes; labels count from 0")
    return count


def fuse(
    updates: Sequence[Source],
    recipe: Recipe | str = "fedavg",
    *,
    masses: Sequence[float] | None = None,
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
        masses: examples behind each one; needed for state dicts unless all weigh alike, else read from the update.
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
        >>> fuse([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], "fedavg", masses=[1, 3]).state_dict()
        {'w': tensor([0.7500])}
    """
    recipe = with_filters(method(recipe) if isinstance(recipe, str) else recipe, align=align, guard=guard)
    _check_honoured(recipe, "fusing files")
    items = _items(updates, masses)
    begin = None if start is None else _start(start)
    if "start" in recipe.needs and begin is None:
        raise RecipeError(f"method {recipe.name!r} needs the weights the sites started from; pass `start`")
    bench = Bench(rows=_rows(server_rows), unlabelled=unlabelled, population=len(items), seed=seed)
    recipe.check(1, bench)
    named = [_dressed_spec(recipe, given, seed) for given in _several(model)]
    admission, brief = gather(items, recipe, begin, named, Rules(quorum=quorum))
    state = ServerState(brief.round, Single(brief.spec, Posterior(brief.params)))
    bench = replace(bench, classes=brief.classes)
    recipe.check(1, bench, state if brief.spec.can_run else None)
    state = fuse_round(recipe, admission.cohort, state, bench)
    return Fused(state.model, tuple(admission.refused), state.facts)


def _check_honoured(recipe: Recipe, where: str) -> None:
    """Refuse what only a server that speaks to its clients can do."""
    if not isinstance(recipe.roster, ClientsOnly):
        raise RecipeError(
            f"method {recipe.name!r} lets the server train as a client or lend its rows, which {where} cannot do; "
            "use `fedfuse run`, or let the server's rows be one more site"
        )
    if not isinstance(recipe.opening, AsItIs):
        raise RecipeError(
            f"method {recipe.name!r} prepares the network on the server before the first round, which {where} cannot "
            "do; use `fedfuse run`"
        )


def _several(model: nn.Module | Spec | Sequence[nn.Module | Spec] | None) -> list[nn.Module | Spec]:
    if model is None:
        return []
    return [model] if isinstance(model, nn.Module | Spec) else list(model)


def _dressed_spec(recipe: Recipe, given: nn.Module | Spec, seed: int) -> Spec:
    """The network the method trains, made of one the user named; options may come with the updates, if it has none."""
    spec = given if isinstance(given, Spec) else Spec.of(given)
    if isinstance(recipe.dress, Plain):
        return spec
    return _dressed(recipe, spec, spec.skeleton().state_dict(), 0, seed).spec


def run(
    file: str | Path,
    *,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    memo: bool = True,
) -> Results:
    """Run an experiment file: every method, every seed, every round, recorded as it happens.

    Args:
        file: the experiment, a TOML file.
        sets: changes to it, as `key.key=value`.
        out: the run directory; by default a new one in `runs`.
        resume: go on with what is in the run directory.
        workers: worker processes; 0 trains in this one, by default there is one per core.
        memo: reuse updates trained before under the same conditions.

    Returns:
        The results: `rows`, one for each method, seed and round, and `table()`, a summary in Markdown.

    Raises:
        ConfigError: before any training, if the experiment or the directory cannot be used.
        QuorumLost: if too few clients could be admitted in a round.

    Example:
        >>> import tempfile
        >>> home = Path(tempfile.mkdtemp())
        >>> _ = (home / "tiny.toml").write_text('methods = [{ name = "fedavg" }, { name = "fednova" }]')
        >>> less = ["data.train_limit=60", "data.clients=2"]
        >>> results = run(home / "tiny.toml", sets=less, out=home / "run", workers=0, memo=False)
        >>> [(row["label"], row["round"]) for row in results.rows]
        [('fedavg', 1), ('fednova', 1)]
        >>> "| fedavg |" in results.table()
        True
    """
    from fedfuse.experiment.jobs import run_file  # late: it brings the data sources and the report with it

    place = None if out is None else Path(out)
    return run_file(Path(file), sets=sets, out=place, resume=resume, workers=workers, memo=memo)


def _items(updates: Sequence[Source], masses: Sequence[float] | None) -> list[Item]:
    if not updates:
        raise ConfigError("there is nothing to fuse: pass at least one update, file or state dict")
    if masses is not None and len(masses) != len(updates):
        raise ConfigError(f"{len(masses)} masses were given for {len(updates)} updates; give one each")
    given = list(masses) if masses is not None else [None] * len(updates)
    items = [_item(u, place, mass) for place, (u, mass) in enumerate(zip(updates, given, strict=True), 1)]
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


def _item(source: Source, place: int, mass: float | None) -> Item:
    match source:
        case Update():
            return Item(source.client, source.payload, mass, source.spec)
        case str() | Path():
            return Item(Path(source).stem, Path(source), mass)
        case nn.Module():
            return Item(f"model-{place}", encode(source.state_dict(), {}), mass)
        case Mapping():
            return Item(f"model-{place}", encode(source, {}), mass)
    raise ConfigError(f"update {place} is a {type(source).__name__}; expected an update, a file or a state dict")


def _start(source: str | Path | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(source, str | Path):
        return dict(source)
    try:
        packet = read(Path(source))
    except Malformed as why:
        raise ConfigError(f"{source} is no file of weights to start from: {why}") from why
    if "members" in packet.header:
        raise ConfigError(f"{source} holds several networks and sites begin with one; distil them into one first")
    return {n: t for n, t in packet.tensors.items() if not n.startswith(NOTE)}


def _check_fit(start: Single) -> None:
    network = forms_of(start.spec.skeleton().state_dict())
    if odd := first_difference(forms_of(start.posterior.mean), network):
        raise ConfigError(
            f"the start does not fit the network {start.spec.factory!r}: {odd[0]} is {odd[1]}, and there it is "
            f"{odd[2]}; start from weights of the same network"
        )


def _dressed(recipe: Recipe, spec: Spec, begin: Params, classes: int, seed: int) -> Single:
    """The network the method trains, at the given weights, which may be those of the dressed network already."""
    fits = begin.keys() == spec.skeleton().state_dict().keys()
    chosen = Single(spec, Posterior(begin)) if fits else Single.of(spec.build(), spec)
    first = recipe.dressed(ServerState(0, chosen), Bench(classes=classes, seed=seed)).single
    return first if fits else Single(first.spec, Posterior(begin))


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


def _runnable(model: Single) -> Single:
    if not model.spec.can_run:
        raise RecipeError(
            f"only the description of {model.spec.factory!r} is here; pass model= to `fuse` to run what was fused, or "
            "fill a network of yours: fused.module(like=network)"
        )
    return model
