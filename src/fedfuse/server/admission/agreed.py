"""What files of one fusion must say alike: by the word of a federation folder, else by that of most files.

A folder's word decides whatever the files say (`Agreed`). Without one, more than half of those that say something
decide, and what fewer than half of all files say at all is not heard: how a fused model names its classes and scales
its rows must never be one client's word. A file that differs is refused by name, unless it can be mapped exactly: an
ensemble's member may have its outputs in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fedfuse.core.inputs import RowForm, TableForm, TextForm, example_inputs, form_key, own_form
from fedfuse.core.messages import Cohort, Form
from fedfuse.core.metadata import About, names_text
from fedfuse.core.model import Single, outputs
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.errors import ConfigError, QuorumLost, Refused
from fedfuse.server.admission.opened import OpenedItem, first_difference, shorten

T = TypeVar("T")

BY_FOLDER = "as the federation folder says; train by that folder"
BY_MOST = "make one federation file with `fedfuse init` and let every site train by it"


@dataclass(frozen=True, slots=True)
class Agreed:
    """What every file of a federation says alike.

    Attributes:
        class_names: the name of each output, in order.
        inputs: the form of rows, with their scale.
        header: further entries of headers: the task and the number of classes.
        networks: entries about the network, as it is and as methods prepare it; none where another start decides.
    """

    class_names: tuple[str, ...]
    inputs: RowForm
    header: Mapping[str, Any]
    networks: tuple[Mapping[str, Any], ...] = ()

    def find_difference(self, opened: OpenedItem, mixed: bool) -> Refused | None:
        """The first entry in which a file differs, whose network may be one of its own where networks are mixed.

        Names of classes and the form of rows are looked at elsewhere, for some methods put them in order.
        """
        if opened.is_plain:
            return None
        header, client = opened.packet.header, opened.item.client
        expected, odd = self.header, _odd_entry(header, self.header)
        if odd is None and not mixed and self.networks:
            if any(_odd_entry(header, one) is None for one in self.networks):
                return None
            expected = next((one for one in self.networks if header.get("spec") == one["spec"]), self.networks[0])
            odd = _odd_entry(header, expected)
        if odd is None:
            return None
        return Refused(client, odd, header.get(odd), f"{shorten(expected[odd])}, {BY_FOLDER}")


def find_other_start(opened: OpenedItem, forms: Mapping[str, Form], start: str) -> Refused | None:
    """Where a file's tensors, or the start that it names, are others than those of the start."""
    client, declared = opened.item.client, opened.packet.header.get("start")
    if opened.has_weights and (odd := first_difference(opened.forms, forms)):
        return Refused(client, odd[0], odd[1], f"{odd[2]}, {BY_FOLDER}")
    if declared is None or declared == start:
        return None
    words = f"{start}, the weights that the sites began with ({BY_FOLDER})"
    return Refused(client, "start", shorten(declared), words)


def _odd_entry(header: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    return next((key for key, value in expected.items() if header.get(key) != value), None)


def find_odd_numbers(headers: Mapping[str, Mapping[str, Any]]) -> dict[str, Refused]:
    """Refusals of files with another round or number of classes than most, where networks may differ otherwise.

    Example:
        >>> list(find_odd_numbers({"a": {"classes": 3}, "b": {"classes": -1}, "c": {"classes": 3}}))
        ['b']
    """
    odd: dict[str, Refused] = {}
    for key in ("round", "classes"):
        values = {client: repr(header.get(key, 0)) for client, header in headers.items() if client not in odd}
        most, count = Counter(values.values()).most_common(1)[0] if values else ("", 0)
        if 2 * count > len(values):  # of two that differ, either may be the odd one
            odd |= {c: Refused(c, key, v, f"{most[:40]}, as most have") for c, v in values.items() if v != most}
    return odd


@dataclass(frozen=True, slots=True)
class CommonNames:
    """What the admitted files agree on.

    Attributes:
        class_names: the name of each output, in the order of most; none if no file tells.
        inputs: the form of rows, if any file tells.
        orders: for a site whose classes stand in another order, at which of its outputs each class stands.
        silent: sites whose files do not name their classes while others do.
        unheard: what fewer than half of the files tell, and which files those are.
    """

    class_names: tuple[str, ...] = ()
    inputs: RowForm | None = None
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    unheard: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader should know before trusting the classes."""
        found = [
            f"{what}: told by {', '.join(who)} alone, by fewer than half of the files, so not by the fused model"
            for what, who in self.unheard.items()
        ]
        if self.silent:
            who, are = ", ".join(self.silent), "does" if len(self.silent) == 1 else "do"
            found += [f"{who} {are} not name the classes: their order is taken to be {names_text(self.class_names)}"]
        return tuple(found)


def agree_on_names(
    headers: Mapping[str, Mapping[str, Any]], recipe: Recipe, refused: list[Refused], agreed: Agreed | None = None
) -> tuple[CommonNames, dict[str, About]]:
    """Let the federation folder decide on classes and inputs, else most files; a file that differs is refused by name.

    Classes in another order are told apart by name: where networks are only asked for their answers, their outputs are
    put in order; where weights are fused, the file is refused, for its start was another one for every class.

    Args:
        headers: what each file says, by client.
        recipe: what will fuse them.
        refused: gets a line for every file that cannot be fused with the others.
        agreed: what a federation folder fixes, if there is one.

    Returns:
        What is agreed, and what each remaining file says of itself.

    Raises:
        QuorumLost: if there is no majority.
    """
    abouts, unheard = _read_all(headers, refused), dict[str, tuple[str, ...]]()
    classes = {client: about.class_names for client, about in abouts.items() if about.class_names}
    if agreed is None and classes and 2 * len(classes) < len(abouts):
        unheard["the names of classes"], classes = tuple(classes), {}
    if agreed is None:
        most = _majority({c: frozenset(n) for c, n in classes.items()}, "classes", lambda s: names_text(sorted(s)))
    else:
        most = frozenset(agreed.class_names)
    if most is not None:
        odd = {c: names for c, names in classes.items() if frozenset(names) != most}
        refused.extend(_other_classes(c, names, most, _word_of(agreed)) for c, names in odd.items())
        abouts = {c: about for c, about in abouts.items() if c not in odd}
    named = [n for c, n in classes.items() if c in abouts]
    if agreed is not None:
        names = agreed.class_names
    elif named:  # the order of most; of equally many, the first in the alphabet, so that no order of files decides
        counts = Counter(named)
        names = min(counts, key=lambda order: (-counts[order], order))
    else:
        names = ()
    orders = _orders({c: n for c, n in classes.items() if c in abouts}, names, recipe, refused, agreed)
    abouts = {c: about for c, about in abouts.items() if c in orders or not names or about.class_names in ((), names)}
    inputs = _agree_on_inputs(abouts, recipe, refused, unheard, agreed)
    silent = tuple(c for c, about in abouts.items() if names and not about.class_names)
    return CommonNames(names, inputs, orders, silent, unheard), abouts


def _read_all(headers: Mapping[str, Mapping[str, Any]], refused: list[Refused]) -> dict[str, About]:
    abouts = {}
    for client, header in headers.items():
        try:
            known = {key: header[key] for key in ("client", "class_names", "inputs") if key in header}
            abouts[client] = about = About.of(known)
            if about.class_names and header.get("classes", len(about.class_names)) != len(about.class_names):
                raise ConfigError(f"it gives {len(about.class_names)} names for {header['classes']!r:.20} classes")
        except ConfigError as why:
            abouts.pop(client, None)
            refused.append(Refused(client, "header", f"wrong: {why}", "what `fedfuse update` writes"))
    return abouts


def _majority(said: Mapping[str, T], what: str, words: Callable[[T], str]) -> T | None:
    """What more than half of the files say that say anything of it."""
    if not said:
        return None
    winner, count = Counter(said.values()).most_common(1)[0]
    if count * 2 <= len(said):
        each = "; ".join(f"{client} has {words(value)}" for client, value in list(said.items())[:4])
        raise QuorumLost(f"no {what} are shared by more than half of the updates: {each}; {BY_MOST}")
    return winner


def _word_of(agreed: Agreed | None) -> str:
    """By whose word a file is refused, and what to do about it."""
    return f"as most have; {BY_MOST}" if agreed is None else BY_FOLDER


def _other_classes(client: str, names: Sequence[str], most: frozenset[str], whose: str) -> Refused:
    extra, lacking = sorted(set(names) - most), sorted(most - set(names))
    parts = [f"with {names_text(extra)}"] if extra else []
    parts += [f"without {names_text(lacking)}"] if lacking else []
    return Refused(
        client,
        "classes",
        f"{names_text(names)} ({', '.join(parts)})",
        f"{names_text(sorted(most))} {whose}",
    )


def _orders(
    classes: Mapping[str, tuple[str, ...]],
    names: tuple[str, ...],
    recipe: Recipe,
    refused: list[Refused],
    agreed: Agreed | None,
) -> dict[str, tuple[int, ...]]:
    """At which of its outputs each class stands, for sites where that is not the common order."""
    odd = {client: own for client, own in classes.items() if own != names}
    if recipe.mixes_networks and not {kind.name for kind in recipe.evidence} & recipe.needs:
        return {client: tuple(own.index(name) for name in names) for client, own in odd.items()}
    whose = f"in which its start was trained; {BY_MOST}" if agreed is None else _word_of(agreed)
    expected = f"the order {names_text(names)}, {whose}"
    refused.extend(Refused(c, "the order of classes", names_text(own), expected) for c, own in odd.items())
    return {}


def _agree_on_inputs(
    abouts: dict[str, About],
    recipe: Recipe,
    refused: list[Refused],
    unheard: dict[str, tuple[str, ...]],
    agreed: Agreed | None,
) -> RowForm | None:
    """The folder's form of rows, or that of most files, the others taken out; none where fewer than half name any."""
    forms = {client: about.inputs for client, about in abouts.items() if about.inputs is not None}
    if agreed is None and forms and 2 * len(forms) < len(abouts):
        unheard["the form of inputs"] = tuple(forms)
        return None
    keys = {client: form_key(form, recipe.mixes_networks) for client, form in forms.items()}
    if agreed is None:
        most = _majority(keys, "inputs", lambda key: str(next(forms[c] for c in keys if keys[c] == key)))
        common = next((forms[client] for client in forms if keys[client] == most), None)
    else:
        most, common = form_key(agreed.inputs, recipe.mixes_networks), agreed.inputs
    for client in forms:
        if keys[client] != most:
            got, wanted = _tell_forms_apart(forms[client], common)
            refused.append(Refused(client, "the form of inputs", got, f"{wanted} {_word_of(agreed)}"))
            del abouts[client]
    return common


def _tell_forms_apart(own: RowForm, common: RowForm | None) -> tuple[str, str]:
    """Two forms in words; of two tables the first column in which they differ, of texts the characters."""
    if isinstance(own, TableForm) and isinstance(common, TableForm):
        return f"a table whose {own.differences(common)}", "the columns and scale"
    if isinstance(own, TextForm) and isinstance(common, TextForm):
        return own.differences(common), "the characters and length"
    return str(own), str(common)


def put_in_order(cohort: Cohort, names: CommonNames) -> tuple[Cohort, list[Refused]]:
    """The cohort with every network's outputs in the common order, and a refusal of each that cannot be put in it."""
    done, refused = [], []
    for update in cohort:
        if update.client in names.orders:
            form = own_form(update.spec) if names.inputs is None else names.inputs
            network = Single(update.spec, update.posterior)
            try:
                moved = reorder_outputs(network, names.orders[update.client], None if form is None else form.shape)
            except ConfigError as why:
                refused.append(Refused(update.client, "the order of classes", str(why), names_text(names.class_names)))
                continue
            update = replace(update, posterior=moved.posterior)
        done.append(update)
    return replace(cohort, updates=tuple(done)), refused


def reorder_outputs(model: Single, order: Sequence[int], shape: tuple[int, ...] | None) -> Single:
    """The same network with its outputs in another order, which is seen to be so; further outputs stay behind.

    Args:
        model: the network.
        order: which of its outputs comes first, second, …
        shape: of one input, to look whether the answers move as they should.

    Example:
        >>> from fedfuse.core.spec import Spec
        >>> spec = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 3})
        >>> model, x = Single.of(spec.build(), spec), torch.ones(1, 2)
        >>> torch.equal(reorder_outputs(model, (2, 0, 1), (2,)).logits(x), model.logits(x)[:, [2, 0, 1]])
        True

    Raises:
        ConfigError: if it cannot be seen that the outputs are those of its last linear layer.
    """
    linear = [layer for layer in model.spec.layout.layers if layer.kind == "linear"]
    count = outputs(model) or 0
    where = torch.tensor([*order, *range(len(order), count)])
    mean = dict(model.posterior.mean)
    for name in filter(None, (linear[-1].weight, linear[-1].bias) if linear and len(where) == count else ()):
        mean[name] = mean[name].index_select(0, where)
    moved = Single(model.spec, Posterior(mean))
    if shape is not None and _moves(model, moved, where, shape):
        return moved
    raise ConfigError(
        f"another than most have, and the outputs of {model.spec.factory!r} cannot be seen to be those of its last "
        "linear layer"
    )


def _moves(model: Single, moved: Single, where: torch.Tensor, shape: tuple[int, ...]) -> bool:
    x = example_inputs(model.spec, shape, 4)
    with torch.no_grad():
        before, after = model.logits(x), moved.logits(x)
    return before.shape[-1] == len(where) and torch.allclose(after, before[:, where], rtol=1e-4, atol=1e-6)
