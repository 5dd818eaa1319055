"""At a site: train, bring the evidence a method asks for, and write it all down as one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedfuse.api.runs import recipe as make_recipe
from fedfuse.core.inputs import ArrayForm, RowForm
from fedfuse.core.messages import Brief
from fedfuse.core.metadata import About, check_class_names, describe, versions
from fedfuse.core.model import Single, outputs
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import NothingBefore, Recipe
from fedfuse.core.rows import Rows, RowSource, as_rows, is_channels_last
from fedfuse.core.seams import ClientsOnly
from fedfuse.core.settings import LocalSettings, validate_settings
from fedfuse.core.spec import Spec
from fedfuse.core.state import EXAMPLES, Bench, ServerState, tell_examples, with_kind
from fedfuse.core.torch_utils import one_thread
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.privacy import Release, release_of
from fedfuse.server.admission.opened import first_difference
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Task, task_header, task_named
from fedfuse.training.round import client_round
from fedfuse.wire.codec import Altered, Malformed, Packet, fingerprint, forms_of, read, write_sealed
from fedfuse.wire.folders import is_folder, open_weights
from fedfuse.wire.messages import NOTE, hand_over, tell_memory


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What a site brings: its trained weights and evidence, as one message; equal to one that says the same bytes."""

    client: str
    packet: Packet = field(repr=False)
    reveals: tuple[str, ...] = ()
    spec: Spec | None = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Update):
            return NotImplemented
        return (self.client, self.reveals) == (other.client, other.reveals) and self.payload == other.payload

    def __hash__(self) -> int:
        return hash((self.client, self.reveals, self.packet.size))

    @property
    def num_examples(self) -> float:
        """How many examples stand behind it."""
        return float(self.packet.header["num_examples"])

    @property
    def about(self) -> About:
        """What its file says of itself."""
        return About.of(self.packet.header)

    @property
    def release(self) -> Release:
        """What it tells of any one row; of an update without noise the signal is infinite."""
        return Release.from_json(self.packet.header.get("privacy"))

    @property
    def facts(self) -> Mapping[str, float]:
        """What its training noted, such as the last epoch's loss."""
        facts: Mapping[str, float] = self.packet.header["facts"]
        return facts

    def telling(self, **entries: Any) -> Update:
        """The same update with more entries in its header; None takes one out."""
        header = {key: value for key, value in {**self.packet.header, **entries}.items() if value is not None}
        client = str(header.get("client", "")) if "client" in entries else self.client
        return replace(self, client=client, packet=Packet.of(self.packet.tensors, header))

    def without_weights(self) -> Update:
        """The evidence alone, for weights that whoever fuses has."""
        notes = self.packet.tensors.part(lambda n: n.startswith(NOTE))
        return replace(self, packet=Packet.of(notes, self.packet.header))

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights."""
        return {n: t.clone() for n, t in self.packet.tensors.items() if not n.startswith(NOTE)}

    @property
    def payload(self) -> bytes:
        """The message as bytes."""
        return self.packet.to_bytes()

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file that `fuse` reads anywhere."""
        write_sealed(Path(path), self.packet.tensors, self.packet.header)
        return Path(path)


def local_update(
    model: nn.Module | Spec,
    rows: RowSource,
    recipe: Recipe | str = "fedavg",
    *,
    client: str = "",
    start: str | Path | Mapping[str, Tensor] | None = None,
    classes: int | Sequence[str] | None = None,
    inputs: RowForm | None = None,
    task: Task | str = CLASSIFICATION,
    seed: int = 0,
    output: int | str | None = None,
    all_examples: int = 0,
    own: Mapping[str, Tensor] | None = None,
    published: Params | None = None,
    **settings: Any,
) -> Update:
    """Train at a site and bring the evidence a method asks for.

    Args:
        model: the network; its present weights are the start unless `start` is given.
        rows: the site's inputs and labels: two tensors, a `Dataset` of pairs, read by its `len()`, or a `DataLoader`.
        recipe: the method, or its name.
        client: the site's name, which `fuse` knows its update by.
        start: common weights to start from, as a state dict or a safetensors file.
        classes: names of all classes in the order of labels, or how many; by default as many as the network's outputs.
        inputs: the form the rows were brought to, where it is more than their shape, or their channels are last.
        task: what is to be learned: "classification", "binary", "multilabel" or "regression".
        seed: fixes every random draw.
        output: which of the network's outputs are the logits, where it gives several: a place, a key or an attribute.
        all_examples: that all sites hold together, for a prior weighed by shares of them; 0 counts it in full.
        own: weights this site trained before, for evidence that recalls them.
        published: what the server tells beside weights, such as whose turn it is.
        settings: of local training: epochs, batch_size, optimizer, …; `lr` and `momentum` are the optimizer's.

    Example:
        >>> import torch
        >>> rows = (torch.randn(20, 4), torch.arange(20) % 2)
        >>> local_update(torch.nn.Linear(4, 2), rows, epochs=2, lr=0.1).num_examples
        20.0
    """
    recipe = make_recipe(recipe) if isinstance(recipe, str) else recipe
    task = task_named(task) if isinstance(task, str) else task
    check_supported(recipe, "a site that only brings a file")
    recipe.check_task(task)
    spec, data = _named_network(model, output), as_rows(rows)
    if inputs is None:
        _check_channels(data)
    module = spec.build() if isinstance(model, Spec) else model
    begin: Params = {n: t.detach().clone() for n, t in module.state_dict().items()}
    names, count = _class_names(classes), _count_classes(classes, Single.of(module, spec), data, task)
    if start is not None:
        description, begin = start_of(start)
        spec = _with_start_shape(spec, description)
    first = prepared_start(recipe, spec, begin, Bench(classes=count, seed=seed, task=task))
    memory = {**(published or {}), **(tell_examples(all_examples) if EXAMPLES in recipe.publishes else {})}
    brief = Brief(0, first.spec, first.posterior.mean, memory, classes=count, task=task)
    with one_thread():
        kept = None if own is None else with_kind("last", dict(own))
        work, trained_on = recipe.work(settings_from(settings)), Rows(data.x.contiguous(), data.y)
        reply = client_round(work, hand_over(brief), client or "site", trained_on, memory=kept, seed=seed).reply
    told = _tell(recipe, client, names, inputs or _form_of(data), fingerprint(brief.params))
    header = {**reply.header, **_tell_task(brief, published), **told}
    return Update(client, Packet.of(reply.tensors, header), recipe.reveals, first.spec)


def bring_evidence(
    model: nn.Module | Spec,
    rows: RowSource,
    method: Recipe | str,
    *,
    client: str = "",
    weights: str | Path | Mapping[str, Tensor] | None = None,
    classes: int | Sequence[str] | None = None,
    inputs: RowForm | None = None,
    task: Task | str = CLASSIFICATION,
    output: int | str | None = None,
    own: Mapping[str, Tensor] | None = None,
    published: Params | None = None,
    **settings: Any,
) -> Update:
    """Bring what a method asks for at a network that is finished, whoever trained it; nobody trains here.

    Args:
        model: the network, with its weights.
        rows: the site's inputs and labels: two tensors, a `Dataset` of pairs, read by its `len()`, or a `DataLoader`.
        method: whose evidence to bring, such as "fedlpa".
        client: the site's name.
        weights: the weights to look at, if not those the network has: a state dict or a safetensors file.
        classes: as for `local_update`.
        inputs: the form the rows were brought to.
        task: what was learned.
        output: which of the network's outputs are the logits.
        own: as for `local_update`.
        published: as for `local_update`.
        settings: of local training that evidence depends on, such as `batch_size`.

    Example:
        >>> import torch
        >>> rows = (torch.randn(200, 4), torch.arange(200) % 2)
        >>> update = bring_evidence(torch.nn.Linear(4, 2), rows, "fedlpa")
        >>> update.num_examples, sorted(update.state_dict())
        (200.0, ['bias', 'weight'])
    """
    made = make_recipe(method) if isinstance(method, str) else method
    update = local_update(
        model,
        rows,
        made,
        client=client,
        start=weights,
        classes=classes,
        inputs=inputs,
        task=task,
        output=output,
        own=own,
        published=published,
        **{**settings, "epochs": 0},
    )
    return update.telling(start=None) if made.trains else update  # networks trained elsewhere share no start


def _check_channels(rows: Rows) -> None:
    """Refuse pictures with their channels last, which a network would read as so many channels as they are high."""
    if is_channels_last(shape := tuple(rows.x.shape[1:])):
        raise ConfigError(
            f"a row's x is {'×'.join(map(str, shape))}, which looks like a picture with its channels last, expected "
            "channels × height × width; turn x by x.permute(0, 3, 1, 2), or, if this network reads it so, say "
            f"inputs=fedfuse.core.inputs.ArrayForm(shape={shape})"
        )


def _class_names(classes: int | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the classes, where they have any."""
    names = () if classes is None or isinstance(classes, int) else tuple(classes)
    check_class_names(names)
    return names


def _named_network(model: nn.Module | Spec, output: int | str | None) -> Spec:
    """The network, and which of its outputs are the logits."""
    spec = model if isinstance(model, Spec) else Spec.of(model, output)
    return spec if output is None else replace(spec, output=output)


def _tell_task(brief: Brief, published: Params | None) -> dict[str, Any]:
    """What an update says of what it was asked: classes, task, the roles of tensors, and the server's memory."""
    header = {"classes": brief.classes, **task_header(brief.task), "layout": describe(brief.spec.layout)}
    return header | ({"memory": tell_memory(published)} if published else {})


def _tell(recipe: Recipe, client: str, names: tuple[str, ...], inputs: RowForm | None, start: str) -> dict[str, Any]:
    """What an update says of itself beside its network and its training."""
    about = About(
        client=client,
        method=recipe.label or recipe.name,
        class_names=names,
        inputs=inputs,
        start=start,
        reveals=recipe.reveals,
        versions=versions(),
    )
    release = release_of(recipe.evidence, recipe.trains)
    noised = {} if release is None else {"privacy": release.to_json()}
    return about.to_json() | {"reveals": list(recipe.reveals)} | noised  # that nothing is revealed is told too


def _form_of(rows: Rows) -> RowForm | None:
    """Arrays of the shape that rows have, where one row has any."""
    shape = tuple(rows.x.shape[1:])
    return ArrayForm(shape=shape) if shape and 0 not in shape else None


def _count_classes(classes: int | Sequence[str] | None, network: Single, rows: Rows, task: Task) -> int:
    """How many classes there are: as the user says, else as many as the network has outputs or the rows have labels."""
    given = classes if isinstance(classes, int) or classes is None else len(classes) or None
    if flaw := task.flaw(rows.y, given or 0):
        raise ConfigError(f"{flaw} (task {task.name})")
    if isinstance(task, Binary):
        return 2
    if not isinstance(task, Classification):
        return given if given is not None else rows.y.shape[1] if rows.y.ndim == 2 else 1
    seen, lowest = (int(rows.y.max()) + 1, int(rows.y.min())) if len(rows) else (0, 0)
    if given is None and lowest and 0 < (made := outputs(network) or 0) < seen <= made + lowest:
        raise ConfigError(
            f"labels run from {lowest} to {seen - 1} and the network has {made} outputs; labels count from 0, so "
            f"subtract {lowest} from each, or say how many classes there are (classes=)"
        )
    count = given if given is not None else max(seen, outputs(network) or 0)
    if seen > count:
        raise ConfigError(f"the rows have the label {seen - 1} and there are {count} classes; labels count from 0")
    return count


def settings_from(given: Mapping[str, Any]) -> LocalSettings:
    """Settings of local training from keywords; `lr`, `momentum` and `weight_decay` are short for the optimizer's."""
    short = {k: given[k] for k in ("lr", "momentum", "weight_decay") if k in given}
    rest = {k: v for k, v in given.items() if k not in short}
    return validate_settings(
        LocalSettings, rest | ({"optimizer": {**rest.get("optimizer", {}), **short}} if short else {})
    )


def start_of(source: str | Path | Mapping[str, Tensor]) -> tuple[object, Params]:
    """The description of its network that a start file carries, if any, and its weights; a folder's stay on disk."""
    if not isinstance(source, str | Path):
        return None, dict(source)
    if is_folder(source):
        return None, open_weights(Path(source)).tensors
    try:
        packet = read(Path(source))
    except Altered:
        raise
    except Malformed as why:
        raise ConfigError(f"{source} is no file of weights to start from: {why}") from why
    if "members" in packet.header:
        raise ConfigError(f"{source} holds several networks and sites begin with one; distil them into one first")
    return packet.header.get("spec"), {n: t for n, t in packet.tensors.items() if not n.startswith(NOTE)}


def _with_start_shape(spec: Spec, description: object) -> Spec:
    """The network the user named, pruned or grown to the shape that a start file of the same network has."""
    if spec.surgery or not isinstance(description, dict):
        return spec
    if (description.get("factory"), description.get("options", {})) != (spec.factory, spec.options):
        return spec
    theirs = Spec.from_json(description, spec.factories)
    return replace(spec, surgery=theirs.surgery, kept=theirs.kept)


def _check_fit(start: Single) -> None:
    network = forms_of(start.spec.skeleton().state_dict())
    if odd := first_difference(forms_of(start.posterior.mean), network):
        raise ConfigError(
            f"the start does not fit the network {start.spec.factory!r}: {odd[0]} is {odd[1]}, and there it is "
            f"{odd[2]}; start from weights of the same network"
        )


def prepared_start(recipe: Recipe, spec: Spec, begin: Params, bench: Bench) -> Single:
    """The network the method trains, at the given weights, which may be those of the prepared network already."""
    given, own = (
        {name: form.shape for name, form in forms_of(tensors).items()}
        for tensors in (begin, spec.skeleton().state_dict())
    )
    fits = given == own
    chosen = Single(spec, Posterior(begin)) if fits else Single.of(spec.build(), spec)
    first = recipe.prepare_models(ServerState(0, chosen), bench).single
    first = first if fits else Single(first.spec, Posterior(begin))
    _check_fit(first)
    return first


def check_supported(recipe: Recipe, where: str) -> None:
    """Refuse what only a server that speaks to its clients can do."""
    if not isinstance(recipe.roster, ClientsOnly):
        raise RecipeError(
            f"method {recipe.name!r} lets the server train as a client or lend its rows, which {where} cannot do; "
            "use `fedfuse run`, or let the server's rows be one more site"
        )
    if not isinstance(recipe.before_first_round, NothingBefore):
        raise RecipeError(
            f"method {recipe.name!r} prepares the network on the server before the first round, which {where} cannot "
            "do; use `fedfuse run`"
        )
