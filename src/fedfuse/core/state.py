"""ServerState, what the next round needs; Bench, what the server may touch; Local, a client at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief, Start
from fedfuse.core.model import Model, Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry, Posterior
from fedfuse.core.rng import stream
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec, drop_tied_names, tie
from fedfuse.core.torch_utils import forward_hooks, in_full
from fedfuse.errors import RecipeError
from fedfuse.tasks import CLASSIFICATION, Task

T = TypeVar("T")

EXAMPLES = "examples"
"""A kind of published memory: how many examples all clients hold together, under "examples/all"."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """All that the next round needs; saving it is a checkpoint.

    Attributes:
        round: rounds done.
        model: what the server would deploy now.
        memory: control variates, masks, momenta, by "kind/tensor" names.
        starts: clients whose next round begins with a model of their own; "" stands for all clients not named.
        facts: what aggregator and steps want a reader to see; emptied every round.
    """

    round: int
    model: Model
    memory: Params = field(default_factory=dict)
    starts: Mapping[str, Start] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def single(self) -> Single:
        """The model, where a method can only go on from one network."""
        if not isinstance(self.model, Single):
            kind = type(self.model).__name__.lower()
            raise RecipeError(f"the model is a {kind}, expected one network; add a distillation step or stop here")
        return self.model

    @property
    def network(self) -> Spec | None:
        """The network of the model or of a start; None for several that differ."""
        return self.start.spec if "" in self.starts or isinstance(self.model, Single) else None

    @property
    def start(self) -> Start:
        """Where a client begins that has no start of its own."""
        return self.starts.get("") or Start(self.single.spec, self.single.posterior.mean)

    def brief(self, publishes: tuple[str, ...], classes: int = 0, task: Task = CLASSIFICATION) -> Brief:
        """What clients get: the model and the published part of the memory."""
        published = {name: t for name, t in self.memory.items() if name.split("/", 1)[0] in publishes}
        return Brief(self.round, *self.start, published, self.starts, classes, task)

    def fused(self, mean: Params, geometry: Geometry | None = None, spec: Spec | None = None) -> ServerState:
        """The state with a new single network; every client starts from it again. Tied weights stay one tensor."""
        network = spec or self.single.spec
        mean = tie(network, mean)
        posterior = Posterior(mean) if geometry is None else Posterior(mean, geometry)
        return replace(self, model=Single(network, posterior), starts={})

    def noting(self, **facts: Any) -> ServerState:
        """The state with more facts for the reader."""
        return replace(self, facts={**self.facts, **facts})


Progress: TypeAlias = Callable[[str, int, int], None]


def _no_progress(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What the server may touch: its own rows, never the test set.

    Attributes:
        rows: labelled rows the server holds, if any.
        unlabelled: inputs without labels, if any.
        population: how many clients there are, asked or not.
        num_examples: how many examples they hold together, 0 if that is not known.
        participation: with which probability each is asked in a round, where they are drawn independently; else 1.
        classes: how many classes there are.
        local: the settings clients train with.
        seed: the run's seed.
        inputs: what an input looks like, if that is known.
        progress: called by long steps with what they do, how far they are, and how far there is to go.
        task: what is to be learned.
        features: the name of each input feature, where they have names.
    """

    rows: Rows | None = None
    unlabelled: Tensor | None = None
    population: int = 0
    classes: int = 0
    local: LocalSettings = field(default_factory=LocalSettings)
    seed: int = 0
    inputs: InputForm | None = None
    task: Task = CLASSIFICATION
    features: tuple[str, ...] = ()
    num_examples: int = 0
    participation: float = 1.0

    progress: Progress = field(default=_no_progress, repr=False, compare=False)

    def stream(self, *purpose: str | int) -> torch.Generator:
        """A random stream for the server's own draws."""
        return stream(self.seed, "server", *purpose)

    @property
    def holds_tokens(self) -> bool:
        """Whether inputs are tokens, as far as is known."""
        if self.inputs is not None:
            return self.inputs.tokens > 0
        known = [x for x in (self.rows.x if self.rows is not None else None, self.unlabelled) if x is not None]
        return any(not x.is_floating_point() for x in known)

    def need_rows(self, who: str) -> Rows:
        """The server's rows, or one sentence saying who misses them."""
        if self.rows is None or not len(self.rows):
            raise RecipeError(f"{who} learns on the server's own rows and there are none; set data.server_fraction")
        return self.rows

    def need_unlabelled(self, who: str) -> Tensor:
        """The inputs without labels, or one sentence saying who misses them."""
        if self.unlabelled is None or not len(self.unlabelled):
            raise RecipeError(f"{who} learns on inputs without labels and there are none; set data.unlabelled")
        return self.unlabelled


@dataclass(slots=True)
class Local:
    """A client at work: the live network, the brief, its own rows, and what it remembers.

    `live` are the parameters in training, `held` the names of those that stay as they are because the brief's memory
    has them under "held/…" (those the network's author froze stay too), `anchor` the live ones' values in the brief,
    `memory` what this client keeps from round to round under "kind/tensor" names, `compiled` whether compiled kernels
    did the training.
    """

    client: str
    brief: Brief
    rows: Rows
    settings: LocalSettings
    module: nn.Module
    memory: dict[str, Tensor]
    seed: int
    lr: float = 0.0
    steps: int = 0
    loss: float = float("nan")
    compiled: bool = False
    held: frozenset[str] = field(init=False)
    live: dict[str, nn.Parameter] = field(init=False)
    anchor: dict[str, Tensor] = field(init=False)
    _cache: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = frozenset(entries_of(self.brief.memory, "held"))
        own = dict(self.module.named_parameters())
        self.live = {n: own[n] for n in live_names(self.brief)}
        self.anchor = {n: self.brief.params[n].to(self.settings.device) for n in self.live}

    @property
    def task(self) -> Task:
        """What is to be learned."""
        return self.brief.task

    @property
    def all_examples(self) -> float:
        """How many examples all clients hold together, if the brief tells; else as many as this one has."""
        told = self.brief.memory.get(f"{EXAMPLES}/all")
        return float(len(self.rows)) if told is None else max(float(told), float(len(self.rows)))

    def stream(self, *purpose: str | int) -> torch.Generator:
        """A random stream of this client in this round."""
        return stream(self.seed, self.brief.round, self.client, *purpose)

    def predict(self, x: Tensor, params: Params | None = None) -> Tensor:
        """The live network's logits, or the same network's with other weights; in float32 at least."""
        if params is None:
            return in_full(self.module(x))
        return in_full(functional_call(self.module, drop_tied_names(self.brief.spec, params), (x,)))

    def recall(self, kind: str) -> dict[str, Tensor]:
        """What this client remembers under a kind, e.g. all of "last/…" by tensor name."""
        return entries_of(self.memory, kind)

    def once(self, key: str, make: Callable[[Local], T]) -> T:
        """Something that does not change within the round, made at its first use."""
        if key not in self._cache:
            self._cache[key] = make(self)
        value: T = self._cache[key]
        return value

    def frozen(self, key: str, params: Params) -> nn.Module:
        """The same network with other weights, in evaluation mode; made once per round and key."""

        def load(local: Local) -> nn.Module:
            module = local.brief.spec.build().eval().requires_grad_(False)
            module.load_state_dict(dict(params))
            return module.to(local.settings.device)

        return self.once(f"frozen/{key}", load)


def live_names(brief: Brief) -> tuple[str, ...]:
    """The parameters that a client of this brief trains: neither frozen by their author nor held by the server.

    Example:
        >>> spec = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})
        >>> live_names(Brief(0, spec, {}, {"held/classifier.weight": torch.ones(())}))
        ('classifier.bias',)
    """
    held = entries_of(brief.memory, "held")
    trainable = brief.spec.layout.trainable
    return tuple(name for name in trainable if name not in held) if held else trainable


def entries_of(memory: Params, kind: str) -> dict[str, Tensor]:
    """The entries named "kind/…", without the kind.

    Example:
        >>> entries_of({"control/w": torch.zeros(1), "mask/w": torch.ones(1)}, "mask")
        {'w': tensor([1.])}
    """
    prefix = f"{kind}/"
    return {name.removeprefix(prefix): t for name, t in memory.items() if name.startswith(prefix)}


def with_kind(kind: str, params: Params) -> dict[str, Tensor]:
    """The inverse of `entries_of`: entries renamed to "kind/…"."""
    return {f"{kind}/{name}": t for name, t in params.items()}


def tell_examples(count: int) -> dict[str, Tensor]:
    """The published memory that tells clients how many examples they all hold; nothing where it is not known.

    Example:
        >>> tell_examples(500), tell_examples(0)
        ({'examples/all': tensor(500., dtype=torch.float64)}, {})
    """
    return with_kind(EXAMPLES, {"all": torch.tensor(float(count), dtype=torch.float64)}) if count else {}


def representation(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A network's logits and the input of its last linear layer, in one forward pass; in float32 at least.

    Example:
        >>> logits, z = representation(nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)), torch.ones(1, 2))
        >>> tuple(logits.shape), tuple(z.shape)
        ((1, 3), (1, 5))
    """
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise RecipeError("the network has no linear layer, so it has no representation; give it a linear classifier")
    seen: dict[nn.Module, Tensor] = {}

    def record_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[module] = args[0] if args else kwargs["input"]

    with forward_hooks(((m, record_input) for m in linear), before=True, with_kwargs=True):
        logits = module(x)
    read = [seen[m] for m in linear if m in seen]  # a layer within an attention block is never called itself
    if not read or len(read[-1]) != len(x):
        raise RecipeError(
            "the network's last linear layer does not read one vector per row, so it has no representation; "
            "give it a linear classifier"
        )
    return in_full(logits), in_full(read[-1].flatten(1))
