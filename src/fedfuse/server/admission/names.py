"""What sites say of their classes and inputs: most decide, the others are mapped where that is exact, or refused.

What fewer than half say is not heard: a fused model's names, and how its rows are scaled, are no one client's word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fedfuse.core.inputs import RowForm, TableForm, TextForm, example_inputs, form_key, own_form
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.metadata import About, names_text
from fedfuse.core.model import Single, outputs
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.errors import ConfigError, QuorumLost, Refused
from fedfuse.server.admission.agreed import BY_FOLDER, Agreed

T = TypeVar("T")

_READ = ("client", "class_names", "inputs")
_REMEDY = "make one federation file with `fedfuse init` and let every site train by it"


@dataclass(frozen=True, slots=True)
class CommonNames:
    """What the admitted files agree on.

    Attributes:
        class_names: the name of each output, in the order of most; none if no file tells.
        inputs: the form of rows, if any file tells.
        orders: for a site whose classes stand in another order, at which of its outputs each class stands.
        silent: sites whose files do not name their classes while others do.
        unheard: what fewer than half of the files tell, and which files: nobody's word is everybody's.
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
    """Let the federation folder decide on classes and inputs, else most files; who says otherwise is refused by name.

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
    told, unheard = _read_all(headers, refused), dict[str, tuple[str, ...]]()
    classes = {client: about.class_names for client, about in told.items() if about.class_names}
    if agreed is None and classes and 2 * len(classes) < len(told):
        unheard["the names of classes"], classes = tuple(classes), {}
    if agreed is None:
        most = _majority({c: frozenset(n) for c, n in classes.items()}, "classes", lambda s: names_text(sorted(s)))
    else:
        most = frozenset(agreed.class_names)
    if most is not None:
        odd = {c: names for c, names in classes.items() if frozenset(names) != most}
        refused.extend(_other_classes(c, names, most, _whose(agreed)) for c, names in odd.items())
        told = {c: about for c, about in told.items() if c not in odd}
    named = [n for c, n in classes.items() if c in told]
    names = _common_order(named) if agreed is None else agreed.class_names
    orders = _orders({c: n for c, n in classes.items() if c in told}, names, recipe, refused, agreed)
    told = {c: about for c, about in told.items() if c in orders or not names or about.class_names in ((), names)}
    inputs = _agree_on_inputs(told, recipe, refused, unheard, agreed)
    silent = tuple(c for c, about in told.items() if names and not about.class_names)
    return CommonNames(names, inputs, orders, silent, unheard), told


def put_in_order(cohort: Cohort, names: CommonNames) -> tuple[Cohort, list[Refused]]:
    """The cohort with every network's outputs in the common order, and those of whom that cannot be done."""
    done, refused = [], []
    for update in cohort:
        try:
            done.append(_in_order(update, names))
        except ConfigError as why:
            refused.append(Refused(update.client, "the order of classes", str(why), names_text(names.class_names)))
    return replace(cohort, updates=tuple(done)), refused


def _in_order(update: ClientUpdate, names: CommonNames) -> ClientUpdate:
    if update.client not in names.orders:
        return update
    form = own_form(update.spec) if names.inputs is None else names.inputs
    network = Single(update.spec, update.posterior)
    moved = reorder_outputs(network, names.orders[update.client], form.shape if form is not None else None)
    return replace(update, posterior=moved.posterior)


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


def _read_all(headers: Mapping[str, Mapping[str, Any]], refused: list[Refused]) -> dict[str, About]:
    told = {}
    for client, header in headers.items():
        try:
            told[client] = about = About.of({key: header[key] for key in _READ if key in header})
            if about.class_names and header.get("classes", len(about.class_names)) != len(about.class_names):
                raise ConfigError(f"it gives {len(about.class_names)} names for {header['classes']!r:.20} classes")
        except ConfigError as why:
            told.pop(client, None)
            refused.append(Refused(client, "header", f"wrong: {why}", "what `fedfuse update` writes"))
    return told


def _majority(said: Mapping[str, T], what: str, words: Callable[[T], str]) -> T | None:
    """What more than half of those say who say anything."""
    if not said:
        return None
    winner, count = Counter(said.values()).most_common(1)[0]
    if count * 2 <= len(said):
        each = "; ".join(f"{client} has {words(value)}" for client, value in list(said.items())[:4])
        raise QuorumLost(f"no {what} are shared by more than half of the updates: {each}; {_REMEDY}")
    return winner


def _whose(agreed: Agreed | None) -> str:
    """Whose word it is that files are held to."""
    return f"as most have; {_REMEDY}" if agreed is None else f"{BY_FOLDER}; train by that folder"


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


def _common_order(named: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The order of most; of equally many, the first in the alphabet, whoever comes first."""
    if not named:
        return ()
    counts = Counter(named)
    return min(counts, key=lambda names: (-counts[names], names))


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
    whose = f"in which its start was trained; {_REMEDY}" if agreed is None else _whose(agreed)
    expected = f"the order {names_text(names)}, {whose}"
    refused.extend(Refused(c, "the order of classes", names_text(own), expected) for c, own in odd.items())
    return {}


def _agree_on_inputs(
    told: dict[str, About],
    recipe: Recipe,
    refused: list[Refused],
    unheard: dict[str, tuple[str, ...]],
    agreed: Agreed | None,
) -> RowForm | None:
    """The folder's form of rows, or that which most tell, the others taken out; none where fewer than half tell any."""
    said = {client: about.inputs for client, about in told.items() if about.inputs is not None}
    if agreed is None and said and 2 * len(said) < len(told):
        unheard["the form of inputs"] = tuple(said)
        return None
    keys = {client: form_key(form, recipe.mixes_networks) for client, form in said.items()}
    if agreed is None:
        most = _majority(keys, "inputs", lambda key: str(next(said[c] for c in keys if keys[c] == key)))
        common = next((said[client] for client in said if keys[client] == most), None)
    else:
        most, common = form_key(agreed.inputs, recipe.mixes_networks), agreed.inputs
    for client in said:
        if keys[client] != most:
            got, wanted = _tell_forms_apart(said[client], common)
            refused.append(Refused(client, "the form of inputs", got, f"{wanted} {_whose(agreed)}"))
            del told[client]
    return common


def _tell_forms_apart(own: RowForm, common: RowForm | None) -> tuple[str, str]:
    """Two forms in words; of two tables the first column in which they differ, of texts the characters."""
    if isinstance(own, TableForm) and isinstance(common, TableForm):
        return f"a table whose {own.differences(common)}", "the columns and scale"
    if isinstance(own, TextForm) and isinstance(common, TextForm):
        return own.differences(common), "the characters and length"
    return str(own), str(common)


def find_odd_numbers(headers: Mapping[str, Mapping[str, Any]]) -> dict[str, Refused]:
    """Who names another round or another number of classes than most, whatever the networks; refused by name.

    Example:
        >>> list(find_odd_numbers({"a": {"classes": 3}, "b": {"classes": -1}, "c": {"classes": 3}}))
        ['b']
    """
    odd: dict[str, Refused] = {}
    for key in ("round", "classes"):
        values = {client: repr(header.get(key, 0)) for client, header in headers.items() if client not in odd}
        most, count = Counter(values.values()).most_common(1)[0] if values else ("", 0)
        if 2 * count > len(values):  # of two who differ, nobody can say who is odd
            odd |= {c: Refused(c, key, v, f"{most[:40]}, as most have") for c, v in values.items() if v != most}
    return odd
