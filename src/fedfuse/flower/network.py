"""The user's own network on either side: given as an object, compared by name, never built at a message's word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from torch import nn

from fedfuse.core.before import ModelPreparation
from fedfuse.core.model import Single
from fedfuse.core.rng import seeded
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, Task

Network: TypeAlias = "nn.Module | Spec | Callable[[], nn.Module]"


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
    """Once per process: modules that were built before can then be used again."""
    with seeded(0, "network"):  # its weights are never used, and nobody else's draws may depend on it
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
        >>> from fedfuse.core.before import AsChosen
        >>> own_network(nn.Linear(2, 2), Spec("os:getcwd"), AsChosen(), 2)
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: the server's network is 'os:getcwd' and this client's is ...
    """
    own = spec_of(network)
    if asked.factories != own.factories:
        with seeded(0, "network"):
            own = prepare_model(Single.of(own.build(), own), classes, 0, task).spec
    if asked.factories != own.factories:
        theirs, ours = (" in ".join(sorted(spec.factories)) for spec in (asked, own))
        raise ConfigError(
            f"the server's network is {theirs!r} and this client's is {ours!r}; give both sides the same class"
        )
    return asked if own.prototype is None else replace(asked, prototype=own.prototype)
