"""The seams: what a method may fill, as protocols, with the plainest choice for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from torch import Tensor

from fedfuse.core.messages import Brief, Cohort, Envelope, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState

Batch: TypeAlias = tuple[Tensor, Tensor]
Result: TypeAlias = Literal["single", "mixture", "apart"]

NOT_EVIDENCE = frozenset({"server_rows", "unlabelled", "start", "training", "network"})
"""What a part may need other than evidence: server rows, clients' first weights, how they trained, networks' code."""


class Objective(Protocol):
    """Client: what a batch's loss is."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The scalar loss of one batch."""


class View(Protocol):
    """Client: which rows it trains on."""

    def __call__(self, rows: Rows, brief: Brief) -> Rows:
        """The rows to train on, given its own."""


class Project(Protocol):
    """Client: where a weight may be after each step."""

    def __call__(self, name: str, value: Tensor, brief: Brief) -> Tensor:
        """The nearest allowed value."""


class Evidence(Protocol):
    """Client: what it sends in addition to its weights, what that reveals, and what the door is to expect."""

    @property
    def name(self) -> str:
        """The first part of every note's name; what aggregators and steps list in `needs`."""

    @property
    def reveals(self) -> str:
        """What leaves the client, in plain words; empty if nothing does."""

    def __call__(self, local: Local) -> Params:
        """The notes of a trained client, named "name/…"."""

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """The notes the door lets through, with their forms."""

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """What is wrong with the values of well-formed notes, if anything."""

    def geometry(self, notes: Params) -> Geometry | None:
        """The posterior's geometry, if these notes describe one."""

    def influence(self, notes: Params) -> Mapping[str, float]:
        """What in these notes scales the client's say in the fused model, by name: numbers ≥ 0 on a log scale.

        A name is a note's, or the first part of several notes' names: multiplying those weakens the lever.
        """

    room: ClassVar[float]  # how many times further than other levers this may differ between honest clients
    weighs: ClassVar[bool]  # whether weights count by what `influence` names, each layer or tensor by its own
    recalls: ClassVar[tuple[ClientMemory, ...]]  # what clients must have kept of the training before


class PlainEvidence:
    """The plainest answers to what evidence may be asked apart from its tensors; inherit them.

    Any finite values pass, they describe no posterior, and nothing in them scales the client's influence.
    """

    __slots__ = ()
    room: ClassVar[float] = 1.0
    weighs: ClassVar[bool] = False
    recalls: ClassVar[tuple[ClientMemory, ...]] = ()

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Any finite value passes."""
        return None

    def geometry(self, notes: Params) -> Geometry | None:  # noqa: ARG002 - the seam's signature
        """Says nothing about the posterior."""
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:  # noqa: ARG002 - the seam's signature
        """Nothing in them scales the client's influence."""
        return {}


class CurvatureEvidence(PlainEvidence):
    """Evidence that looks at the curvature of a client's loss: its FLOPs have a column of their own."""

    __slots__ = ()


class ClientMemory(Protocol):
    """Client: what it keeps for its next round; nothing of it is sent."""

    def __call__(self, local: Local, notes: Params) -> Params:
        """What to remember under "kind/tensor" names, given the trained client and the evidence it sends."""


class ServerPart(Protocol):
    """What every part of the server's half may be asked apart from its work, with the plainest answers; inherit it."""

    __slots__ = ()

    @property
    def needs(self) -> frozenset[str]:
        """Names of the evidence it reads, and of what else it needs that `NOT_EVIDENCE` lists."""
        return frozenset()

    @property
    def result(self) -> Result | None:
        """The kind of model it leaves, where that is not the kind it found."""
        return None

    @property
    def mixes_networks(self) -> bool:
        """Whether clients may have networks of different architectures or widths."""
        return False

    @property
    def reshapes(self) -> bool:
        """Whether the network it leaves may have other shapes than the one it found."""
        return False

    @property
    def counts_steps(self) -> bool:
        """Whether clients weigh by their numbers of local steps, which then must be known and not guessed."""
        return False

    @property
    def needs_classes(self) -> bool:
        """Whether it makes sense only for rows of one class each; parts of the client's half may say so too."""
        return False

    def passes(self, clients: int, bench: Bench) -> float:  # noqa: ARG002 - the seam's signature
        """About how many examples it passes through a network in a round of so many clients, for `--check`."""
        return 0.0

    def seconds(self, bench: Bench) -> float:  # noqa: ARG002 - the seam's signature
        """Seconds of long work in a round that are not those passes', by a short trial on this machine."""
        return 0.0

    def remark(self, asked: int, bench: Bench) -> str:  # noqa: ARG002 - the seam's signature
        """What a user should know before training when so many clients are asked a round, if anything."""
        return ""

    @property
    def only_sums(self) -> bool:
        """Whether it reads nothing of its clients but sums over them, so that secure aggregation fits."""
        return False

    @property
    def knows_adapters(self) -> bool:
        """Whether it knows that of a low-rank adapter's two factors the product counts; others may not fuse them."""
        return False

    @property
    def tensorwise(self) -> bool:
        """Whether what becomes of a tensor depends on that tensor alone, so that a model can be fused in parts."""
        return False

    @property
    def layerwise(self) -> bool:
        """Whether what becomes of a layer, weight and bias, depends on that layer and its evidence alone."""
        return self.tensorwise

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """Raise before any training what could not work; "" stands for all clients without a network of their own."""
        return  # without this, an empty body: type checkers take a protocol's for one that must be overridden

    def drawn_by(self, bench: Bench) -> Self:  # noqa: ARG002 - the seam's signature
        """A guard for a run that asks clients in this way; for most it makes no difference who was asked."""
        return self

    def account(self, cohort: Cohort, state: ServerState) -> ServerState:  # noqa: ARG002 - the seam's signature
        """The state with what a guard must remember of a round: most need not remember any."""
        return state


class Alignment(Protocol):
    """Server: every client's hidden units go to common places, before anything is compared or fused."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of the evidence it reads."""

    @property
    def mixes_networks(self) -> bool:
        """Whether clients may have networks of different widths."""

    @property
    def laws(self) -> frozenset[str]:
        """The laws of the common suite that still hold behind it."""

    def __call__(self, cohort: Cohort, bench: Bench) -> tuple[Cohort, Mapping[str, Any]]:
        """The cohort with its units at common places, and what a reader should know of it."""


class Guard(ServerPart, Protocol):
    """Server: a robust filter; a cohort goes in, a safer one comes out."""

    @property
    def laws(self) -> frozenset[str]:
        """The laws of the common suite that still hold behind it."""

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:
        """The cohort that is fused."""


class Aggregator(ServerPart, Protocol):
    """Server: the cohort becomes the next model."""

    @property
    def laws(self) -> frozenset[str]:
        """The laws of the common suite that it keeps."""

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Fuse the cohort."""


class ServerStep(ServerPart, Protocol):
    """Server: something done to the fused model."""

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Take the step."""


class DiagnosticStep(ServerPart):
    """A step that only notes something for the reader: its seconds are counted apart from the method's."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """Side effects of a roster: clients asked always, rows lent to all, bytes sent for them.

    Attributes:
        always: who is asked in every round, in addition to those chosen.
        shared_rows: rows of the server's that every client was given: they count in its num_examples.
        shared_bytes: bytes of them in all, sent before the first round.
        reveals: in plain words, what was given to whom.
    """

    always: tuple[str, ...] = ()
    shared_rows: int = 0
    shared_bytes: int = 0
    reveals: tuple[str, ...] = ()

    def claimable_examples(self, declared: Mapping[str, int]) -> dict[str, int]:
        """How many examples each client may claim, the lent ones among them.

        Example:
            >>> Terms(shared_rows=5).claimable_examples({"a": 10})
            {'a': 15}
        """
        return {client: count + self.shared_rows for client, count in declared.items()}


class Engine(Protocol):
    """Where clients live: on this machine, on a federation, in files."""

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients that could be asked."""

    @property
    def terms(self) -> Terms:
        """Side effects of its roster."""

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterable[Envelope]:
        """Send the brief to the asked clients; bring back what they answer, in any order."""


class Roster(Protocol):
    """Server: who answers."""

    @property
    def needs(self) -> frozenset[str]:
        """What it needs of the server, of what `NOT_EVIDENCE` lists."""

    @property
    def reveals(self) -> str:
        """What leaves the server for its clients, in plain words; empty if nothing does."""

    def __call__(self, engine: Engine, bench: Bench) -> Engine:
        """The engine, perhaps with more clients in it."""


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """The plain objective: the task's mean loss over the batch; for classes, cross entropy."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """Mean over the batch of the negative log-likelihood."""
        return local.task.loss(local.predict(batch[0]), batch[1])


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Train on what is yours."""

    def __call__(self, rows: Rows, brief: Brief) -> Rows:  # noqa: ARG002 - the seam's signature
        """The rows as they are."""
        return rows


@dataclass(frozen=True, slots=True)
class Free:
    """Weights may be anywhere."""

    def __call__(self, name: str, value: Tensor, brief: Brief) -> Tensor:  # noqa: ARG002 - the seam's signature
        """The value as it is."""
        return value


@dataclass(frozen=True, slots=True)
class ClientsOnly:
    """Only the clients answer."""

    needs: ClassVar[frozenset[str]] = frozenset()
    reveals: ClassVar[str] = ""

    def __call__(self, engine: Engine, bench: Bench) -> Engine:  # noqa: ARG002 - the seam's signature
        """The engine as it is."""
        return engine


@dataclass(frozen=True, slots=True)
class Work:
    """The client half of a recipe with its settings: with brief, rows and seed it fixes the reply to the last bit.

    Where it does not train, a client brings its evidence at the brief's weights and sends no weights back.
    """

    settings: LocalSettings = field(default_factory=LocalSettings)
    objective: Objective = field(default_factory=TaskLoss)
    view: View = field(default_factory=OwnRows)
    project: Project = field(default_factory=Free)
    evidence: tuple[Evidence, ...] = ()
    memory: tuple[ClientMemory, ...] = ()
    trains: bool = True

    @property
    def key(self) -> str | None:
        """Canonical text of the work, or None if a part has no stable one (a lambda, say)."""
        text = repr(self)
        return None if " at 0x" in text else text


TRAINING_PASSES = 3.0
"""What plain training takes of a row: a pass forward, the gradient of what goes in, the gradient of the weights."""


class Effort(NamedTuple):
    """What the work of a client's round is counted by.

    Attributes:
        spec: the network.
        shape: of one input.
        round: counted from 0.
        rows: how many the client has.
        settings: how it trains.
    """

    spec: Spec
    shape: tuple[int, ...]
    round: int
    rows: float
    settings: LocalSettings


@runtime_checkable
class HasPasses(Protocol):
    """An objective that takes more of the network than plain training does says how much."""

    def passes(self, effort: Effort) -> float:
        """Passes through the network per row of a batch, a pass forward being one and plain training three."""
        ...


def passes_of(objective: object, effort: Effort) -> float:
    """What an objective takes of a row: what it says, else what its base takes, else plain training.

    Example:
        >>> passes_of(object(), Effort(Spec("mlp"), (4,), 0, 10, LocalSettings()))
        3.0
    """
    if isinstance(objective, HasPasses):
        return objective.passes(effort)
    base = getattr(objective, "base", None)
    return TRAINING_PASSES if base is None else passes_of(base, effort)
