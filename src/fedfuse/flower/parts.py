"""What a strategy and its clients must agree on: the network, the method, and what clients can be asked.

A strategy refuses at once, part by part of the recipe, what its kind of clients could not carry out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from torch import nn

from fedfuse.core.model import Single
from fedfuse.core.recipe import AsChosen, ModelPreparation, NothingBefore, Recipe
from fedfuse.core.registry import all_methods, find_method
from fedfuse.core.rng import seeded
from fedfuse.core.seams import ClientsOnly, Free, OwnRows, TaskLoss
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.tasks import CLASSIFICATION, Task

Network: TypeAlias = "nn.Module | Spec | Callable[[], nn.Module]"
Clients: TypeAlias = Literal["plain", "fedfuse"]

_AS_APP = "run it as an app (`fedfuse flower FILE --app`)"
_HERE = "run it on one machine (`fedfuse run FILE`)"
USE_FEDFUSE_CLIENTS = f"{_AS_APP}, or let your ClientApp train with `fedfuse.flower` and say clients='fedfuse'"


def spec_of(network: Network) -> Spec:
    """The spec of a network given as a module, as a class or function that makes one, or as a spec.

    Example:
        >>> spec_of(nn.Sequential(nn.Linear(2, 2))).factory
        'torch.nn.modules.container:Sequential'
    """
    if isinstance(network, Spec):
        return network
    return Spec.of(network) if isinstance(network, nn.Module) else _spec_from_factory(network)


@lru_cache(maxsize=4)
def _spec_from_factory(factory: Callable[[], nn.Module]) -> Spec:
    # Once per process: built modules are cached by their spec, of which a new prototype would make another every round.
    with seeded(0, "network"):  # its weights are never used, and no other draw may depend on them
        module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{factory!r:.80} gave a {type(module).__name__}, expected a torch.nn.Module")
    return Spec.of(module)


def own_network(
    network: Network, asked: Spec, prepare_model: ModelPreparation, classes: int, task: Task = CLASSIFICATION
) -> Spec:
    """The network the server asks for, made of the one given here.

    Raises:
        ConfigError: if the server means another network.

    Example:
        >>> from fedfuse.core.recipe import AsChosen
        >>> own_network(nn.Linear(2, 2), Spec("os:getcwd"), AsChosen(), 2)
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: the server's network is 'os:getcwd' and this client's is ...
    """
    own = spec_of(network)
    if asked.factories != own.factories:  # the method may have wrapped ours, as in Bayesian layers: do the same
        with seeded(0, "network"):
            own = prepare_model(Single.of(own.build(), own), classes, 0, task).spec
    if asked.factories != own.factories:
        theirs, ours = (" in ".join(sorted(spec.factories)) for spec in (asked, own))
        raise ConfigError(
            f"the server's network is {theirs!r} and this client's is {ours!r}; give both sides the same class"
        )
    return asked if own.prototype is None else replace(asked, prototype=own.prototype)


def named_recipe(chosen: str | Mapping[str, Any] | Recipe) -> tuple[Recipe, str]:
    """A recipe, and the text from which a client can make its own half of it; empty where no text could.

    Args:
        chosen: a method's name, a table with its `name` and options, or a recipe.

    Example:
        >>> named_recipe({"name": "fedprox", "mu": 0.1})[1]
        '{"mu": 0.1, "name": "fedprox"}'
    """
    if isinstance(chosen, Recipe):
        return chosen, json.dumps({"name": chosen.name}) if _is_as_registered(chosen) else ""
    table = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    recipe = recipe_from(table)
    try:
        return recipe, json.dumps(table, sort_keys=True)
    except TypeError as why:
        raise ConfigError(f"method {recipe.name!r}: its options must be plain data to reach clients ({why})") from why


def recipe_from(table: object) -> Recipe:
    """The recipe that a table with a method's name and options describes."""
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(f"a method is a name, or a table with a name and options; got {table!r:.80}")
    return find_method(table["name"]).recipe(**{str(key): value for key, value in table.items() if key != "name"})


def _is_as_registered(recipe: Recipe) -> bool:
    """Whether the method of that name, as it is, asks the same of clients."""
    if recipe.later is not None or recipe.name not in all_methods():
        return False
    usual, settings = find_method(recipe.name).recipe(), LocalSettings()
    return usual.work(settings) == recipe.work(settings) and usual.prepare_model == recipe.prepare_model


def stages(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe and all that it hands over to.

    Example:
        >>> first, then = (find_method(name).recipe() for name in ("fedavg", "fednova"))
        >>> [stage.name for stage in stages(first.then(3, then))]
        ['fedavg', 'fednova']
    """
    now: Recipe | None = recipe
    while now is not None:
        yield now
        now = now.later[1] if now.later else None


def refuse_unfit(recipe: Recipe, clients: Clients) -> None:
    """Refuse a recipe that clients of this kind could not carry out, whatever it is called.

    Raises:
        RecipeError: naming the part and the ways that work.

    Example:
        >>> refuse_unfit(find_method("fedprox").recipe(), "plain")
        Traceback (most recent call last):
        ...
        fedfuse.errors.RecipeError: method 'fedprox' gives clients an objective of its own (Proximal), which a plain ...
    """
    for now in stages(recipe):
        for why, way in _obstacles(now):
            raise RecipeError(f"method {now.name!r} {why}; {way}")
        for why in _asked_of_clients(now) if clients == "plain" else ():
            raise RecipeError(
                f"method {now.name!r} {why}, which a plain Flower client does not know of; {USE_FEDFUSE_CLIENTS}"
            )


def _obstacles(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What no Flower strategy can do, and what can be done instead."""
    if recipe.result != "single":
        kind = "a mixture of networks" if recipe.result == "mixture" else "networks that stay apart"
        yield f"ends a round with {kind}, and a Flower strategy returns one network", _AS_APP
    if type(recipe.roster) is not ClientsOnly:
        lends = bool(getattr(recipe.roster, "reveals", ""))
        what = "lends the server's rows to clients" if lends else "lets the server train as a client"
        yield f"has a roster ({_kind(recipe.roster)}) that {what}", _HERE if lends else _AS_APP


def _asked_of_clients(recipe: Recipe) -> Iterator[str]:
    """What clients would have to do beyond training the network they are sent."""
    if not recipe.trains:
        yield "asks clients not to train in a round"
    if type(recipe.objective) is not TaskLoss:
        yield f"gives clients an objective of its own ({_kind(recipe.objective)})"
    if type(recipe.view) is not OwnRows:
        yield f"gives clients a view of their rows ({_kind(recipe.view)})"
    if type(recipe.project) is not Free:
        yield f"gives clients a projection of their weights ({_kind(recipe.project)})"
    if recipe.evidence:
        kinds = ", ".join(_kind(evidence) for evidence in recipe.evidence)
        yield f"asks clients for evidence or memory beside their weights ({kinds})"
    if recipe.memory:
        yield f"lets clients remember ({', '.join(_kind(part) for part in recipe.memory)})"
    if recipe.publishes:
        yield f"tells clients of the server's memory ({', '.join(recipe.publishes)})"
    if type(recipe.prepare_model) is not AsChosen:
        yield f"trains a prepared network ({_kind(recipe.prepare_model)})"
    if type(recipe.before_first_round) is not NothingBefore:
        yield f"takes a step before round one ({_kind(recipe.before_first_round)})"
    for part in _server_parts(recipe):
        if getattr(part, "reshapes", False):
            yield f"changes the network's shape ({_kind(part)})"


def refuse_unknown_training(recipe: Recipe, local: LocalSettings | None) -> None:
    """Refuse a recipe whose server must know how clients train, where the user does not say it.

    What one client says of itself must not decide whether a round goes on.

    Raises:
        RecipeError: naming the method and what to say.
    """
    for now in stages(recipe) if local is None else ():
        if "training" in now.needs:
            raise RecipeError(
                f"method {now.name!r} must know how clients train and was not told; say it, as in "
                "local={'lr': 0.1, 'momentum': 0.9, 'epochs': 1}"
            )


def counts_steps(recipe: Recipe) -> bool:
    """Whether it weighs clients by how many steps they took: a number that was not reported must not be guessed.

    Example:
        >>> counts_steps(find_method("fednova").recipe()), counts_steps(find_method("fedavg").recipe())
        (True, False)
    """
    return any(getattr(part, "counts_steps", False) for part in _server_parts(recipe))


def _server_parts(recipe: Recipe) -> Iterator[object]:
    """Every part of the server's half, and the parts they are made of."""
    parts: list[object] = [recipe.before_first_round, recipe.aggregate, *recipe.steps]
    while parts:
        yield (part := parts.pop(0))
        if is_dataclass(part):
            parts[:0] = [getattr(part, own.name) for own in fields(part)]


def _kind(part: object) -> str:
    return type(part).__name__
