"""Which rule takes the mean of moves: one that reads weights alone, or one in the metric of what clients bring."""

from __future__ import annotations

from typing import Any

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.errors import ConfigError


def rule_named(whose: str, option: str, name: str, options: dict[str, Any] | None) -> Recipe:
    """The aggregator of another method with the evidence that it reads, if it is nothing more.

    Raises:
        ConfigError: if that method also changes training, or does more with what was fused.
    """
    inner = find_method(name).recipe(**(options or {}))
    if inner != Recipe(aggregate=inner.aggregate, evidence=inner.evidence, name=inner.name, label=inner.label):
        raise ConfigError(
            f"method {whose!r}: {option} is {name!r}, which is more than a rule that fuses; expected one such as "
            "regmean, fisher or fedlpa, or of weights alone fedavg, ties or slerp"
        )
    if inner.result != "single":
        raise ConfigError(
            f"method {whose!r}: {option} is {name!r}, which gives several networks; expected a rule that gives one"
        )
    return inner


def metric_named(whose: str, name: str, options: dict[str, Any] | None) -> Recipe:
    """The rule that takes the mean of moves in the metric of clients' evidence.

    Raises:
        ConfigError: if it reads none.
    """
    inner = rule_named(whose, "metric", name, options)
    if not inner.evidence:
        raise ConfigError(
            f"method {whose!r}: metric is {name!r}, which reads no evidence and so has no metric; expected one such as "
            "regmean, fisher or fedlpa"
        )
    return inner
