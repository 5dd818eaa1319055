"""How a client trains: plain, checked settings that a config file, a recipe and a message share."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from fedfuse.errors import ConfigError

S = TypeVar("S", bound=BaseModel)

_MAX_COUNT = 10**9  # more epochs, steps or rows in a batch than training ever takes


class Settings(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def validate_settings(schema: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Build settings from plain values, with one plain sentence for the first thing that is wrong.

    Example:
        >>> validate_settings(Optimizer, {"lrr": 0.1})
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: there is no key 'lrr'; did you mean 'lr'?
    """
    try:
        return schema(**values)
    except ValidationError as why:
        raise ConfigError(explain(why, schema, where)) from why


def explain(error: ValidationError, schema: type[BaseModel], where: str = "") -> str:
    """A validation error's first complaint as one sentence, with a suggestion for a misspelt key."""
    first = error.errors()[0]
    path = [str(p) for p in first["loc"]]
    name = ".".join([*([where] if where else []), *path])
    if first["type"] == "extra_forbidden":
        known = _fields_at(schema, path[:-1])
        near = _nearest_key(path[-1], known, schema)
        return f"there is no key {name!r}; " + (f"did you mean {near!r}?" if near else f"known: {', '.join(known)}")
    if first["type"] == "missing":
        return f"the key {name!r} is missing"
    if first["type"] == "too_short":
        least = first["ctx"]["min_length"]
        return f"{name} is {first['input']!r}, expected a list of at least {least}; leave it out for the default"
    message = first["msg"].removeprefix("Value error, ")
    if message.startswith("Input should be "):
        return f"{name} is {first['input']!r}, expected {message.removeprefix('Input should be ')}"
    return f"{name}: {message}" if name else message


def _nearest_key(word: str, known: list[str], schema: type[BaseModel]) -> str | None:
    """The key that was meant: one of those known here, or one of a table below that is nearer."""
    elsewhere = {path.rpartition(".")[2]: path for path in reversed(list(_paths_below(schema)))}
    here = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    there = difflib.get_close_matches(word, elsewhere, n=1, cutoff=0.8)
    likeness = {near: difflib.SequenceMatcher(None, word, near).ratio() for near in (*here, *there)}
    if there and (not here or likeness[there[0]] > likeness[here[0]]):
        return elsewhere[there[0]]
    return here[0] if here else None


def _paths_below(schema: Any, prefix: str = "", depth: int = 3) -> Iterator[str]:
    """The dotted keys of a schema and of the tables in it."""
    for key, field in schema.model_fields.items():
        yield f"{prefix}{key}"
        inner = [t for t in _types(field.annotation) if hasattr(t, "model_fields")]
        for table in inner if depth else ():
            yield from _paths_below(table, f"{prefix}{key}.", depth - 1)


def _fields_at(schema: type[BaseModel], path: list[str]) -> list[str]:
    """The keys known at a path in a nested schema."""
    now: Any = schema
    for part in path:
        field = getattr(now, "model_fields", {}).get(part)
        inner = [t for t in _types(field.annotation) if hasattr(t, "model_fields")] if field else []
        matching = [t for t in inner if len(inner) == 1] or inner
        now = matching[0] if matching else now if not field else None
    return list(getattr(now, "model_fields", {}))


def _types(annotation: Any) -> list[Any]:
    parts = [t for arg in get_args(annotation) for t in _types(arg)]
    return [annotation, *parts]


class Optimizer(Settings):
    """One of SGD (momentum, weight decay), Adam and AMSGrad, with a fresh state every round."""

    eps: ClassVar[float] = 1e-8  # what Adam adds to the root of a second moment

    name: Literal["sgd", "adam", "amsgrad"] = "sgd"
    lr: PositiveFloat = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)

    @property
    def own_momentum(self) -> float:
        """The momentum in force: Adam has none of this kind."""
        return self.momentum if self.name == "sgd" else 0.0


def effective_steps(steps: int, momentum: float) -> float:
    """How many gradients local steps are worth: a = (τ − ρ(1−ρ^τ)/(1−ρ)) / (1−ρ), which is τ without momentum.

    With a constant gradient g, τ steps of momentum SGD move the weights by −η·a·g (FedNova's normalizer).

    Example:
        >>> effective_steps(5, 0.0), round(effective_steps(2, 0.5), 3)
        (5.0, 2.5)
    """
    rho = momentum
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


class Decay(Settings):
    """The rate is multiplied by `gamma` every `every` local epochs, or at the `milestones`.

    Milestones count local epochs over all rounds: with 3 epochs a round, milestone 6 is the third round.
    """

    gamma: Annotated[float, Field(gt=0, le=1)]
    every: PositiveInt | None = None
    milestones: tuple[PositiveInt, ...] = ()

    def factor(self, epoch: int, total_epoch: int) -> float:
        """What the rate is multiplied by in this local epoch.

        Example:
            >>> Decay(gamma=0.5, every=2).factor(epoch=5, total_epoch=5)
            0.25
        """
        times = epoch // self.every if self.every else 0
        return float(self.gamma ** (times + sum(total_epoch >= m for m in self.milestones)))


class MoveNoise(Settings):
    """What every client does to its move before it leaves: shortened to C, with noise N(0, (zC)²/K) on every weight.

    The sum of K such moves has the noise N(0, (zC)²), as if a trusted server had added it once.

    Attributes:
        clip: C.
        noise: z, the noise of the sum over the sensitivity.
        clients: K, the number of clients that was agreed on.
        reproducible: draw the noise from the seed, for simulations alone; else from the operating system.
    """

    clip: PositiveFloat = 1.0
    noise: PositiveFloat = 1.0
    clients: PositiveInt
    reproducible: bool = False

    @property
    def sigma(self) -> float:
        """The standard deviation of one client's noise, zC/√K."""
        return self.noise * self.clip / math.sqrt(self.clients)


class LocalSettings(Settings):
    """Everything about local training that is not the method's business.

    `log_variance_lr` is the rate of log-variances of Bayesian layers in an epoch, shared among its natural-gradient
    steps, whatever their number; it decays with the optimizer's. `kernel` says who does the arithmetic: "torch",
    "compiled" (see `fedfuse.kernels`), or "auto" for the compiled one where it knows the network and is faster. They
    differ in rounding alone. With `epochs = 0` nobody takes a step: a site then brings evidence for the weights it was
    given, of a finished model say.
    `private` has every client shorten its move and add noise to it (see `MoveNoise`).

    Example:
        >>> LocalSettings(epochs=2, optimizer={"lr": 0.1}).optimizer.lr
        0.1
    """

    epochs: NonNegativeInt = 1
    max_steps: PositiveInt | None = None
    batch_size: PositiveInt = 64
    drop_last: bool = False
    optimizer: Optimizer = Optimizer()
    decay: Decay | None = None
    round_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    log_variance_lr: NonNegativeFloat = 0.25
    l1: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = None
    augment: Any = None
    device: str = "cpu"
    kernel: Literal["auto", "torch", "compiled"] = "auto"
    private: MoveNoise | None = None

    def to_json(self) -> dict[str, Any]:
        """How a client trained, as plain data for a message: whatever a method could need, and not where it ran.

        Example:
            >>> LocalSettings(epochs=2).to_json()["optimizer"]["momentum"]
            0.0
        """
        return self.model_dump(mode="json", exclude={"augment", "device", "kernel"}, exclude_none=True)

    @classmethod
    def from_json(cls, data: object) -> LocalSettings:
        """Read what a client says of its training.

        Raises:
            ConfigError: in the words of the first thing that is wrong.
        """
        if not isinstance(data, dict) or data.keys() & {"augment", "device", "kernel"}:
            raise ConfigError("it must be a table of training settings")
        settings = validate_settings(cls, data)
        if max(settings.epochs, settings.max_steps or 1, settings.batch_size) > _MAX_COUNT:
            raise ConfigError(f"epochs, steps and batches must be at most {_MAX_COUNT:,}")
        return settings

    def rate(self, round_: int, epoch: int) -> float:
        """The learning rate in force: lr · round_decay^round · decay."""
        step = self.decay.factor(epoch, round_ * self.epochs + epoch) if self.decay else 1.0
        return self.optimizer.lr * self.round_decay**round_ * step

    def steps_for(self, num_examples: float) -> int:
        """How many optimizer steps training on so many examples takes.

        Example:
            >>> LocalSettings(epochs=3, batch_size=32).steps_for(100)
            12
        """
        steps = self.epochs * self.steps_per_epoch(num_examples)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def steps_per_epoch(self, num_examples: float) -> int:
        """How many optimizer steps one pass over so many examples takes."""
        batches = num_examples / self.batch_size
        return math.floor(batches) if self.drop_last else math.ceil(batches)


FEW = 5  # fewer clients have no robust centre
_NOTHING = 1e-9  # what is smaller has no say to be compared: squared gradients of rows known by heart, say
_SIGMA = 1.4826  # the median distance from the median, times this, is a Gaussian's standard deviation

Over = Literal["refuse", "clip", "off"]


class Bounds(Settings):
    """How far above the others a client's levers may be.

    Attributes:
        ratio: always allowed, of each lever and of their product: this multiple of the median.
        spread: also allowed: so many robust deviations above the median, on a log scale; of the product half as many.
        together: whether what a client's levers make together is bounded too.
        few: with fewer than five clients: this multiple of what the brief or the median gives.
        share: the largest share of all examples that one client may have by its own word.
        margin: whoever exceeds a bound by less than this factor is weakened to it: honest clients differ that much.
        over: whether whoever exceeds it by more is refused, or weakened too; "off" compares nobody with anybody.
    """

    ratio: Annotated[float, Field(gt=1)] = 2.0
    spread: NonNegativeFloat = 3.0
    together: bool = True
    few: Annotated[float, Field(gt=1)] = 100.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    margin: Annotated[float, Field(ge=1)] = 1000.0
    over: Over = "refuse"

    def limit_together(self, values: Sequence[float]) -> float:
        """The most that a client's levers may make together in a layer: half as many deviations as of each alone.

        Example:
            >>> apart = [1.0, 2.0, 4.0, 8.0, 16.0]
            >>> Bounds(spread=2.0).limit_together(apart) == Bounds(spread=1.0).limit(apart)
            True
        """
        return self.model_copy(update={"spread": self.spread / 2}).limit(values)

    def limit(self, values: Sequence[float], expected: float = 0.0) -> float:
        """The most a lever may be, given everybody's; infinite where nothing is known.

        Args:
            values: of every client.
            expected: what the brief says the lever is about, 0 if it says nothing; asked where clients are few.

        Example:
            >>> Bounds(ratio=6.0).limit([1.0, 1.0, 2.0, 1.0, 1.0, 1e9])
            6.0
            >>> Bounds(few=100).limit([1.0, 1e9], expected=3.0), Bounds().limit([0.0, 0.0, 0.0, 0.0, 1.0])
            (300.0, inf)
        """
        middle = statistics.median(values)
        if len(values) < FEW:
            known = max(expected, middle if len(values) > 2 else 0.0)
            return self.few * known if known > _NOTHING else math.inf
        if not _NOTHING < middle < math.inf:
            return math.inf
        logs = [math.log(max(value, _NOTHING)) for value in values]
        centre = math.log(middle)
        deviation = _SIGMA * statistics.median(abs(x - centre) for x in logs)
        return math.exp(min(centre + max(math.log(self.ratio), self.spread * deviation), 700.0))


AMONG_OWN = Bounds(ratio=2.5, spread=4.0, together=False)
"""For clients that a simulation made itself: wide, so that honest ones, however different, are hardly ever weakened."""
