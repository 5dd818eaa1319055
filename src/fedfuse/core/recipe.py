"""The seven seams as protocols, and the Recipe that fills them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from fedfuse.core.messages import Brief, Cohort, Envelope, Flaw, Form, Start
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry, Posterior
from fedfuse.core.rng import seed_for
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.errors import RecipeError

Batch: TypeAlias = tuple[Tensor, Tensor]


class Objective(Protocol):
    """Client: what a batch's loss is."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """The scalar loss of one batch."""
        ...


class View(Protocol):
    """Client: which rows it trains on."""

    def __call__(self, rows: Rows, brief: Brief) -> Rows:
        """The rows to train on, given its own."""
        ...


class Project(Protocol):
    """Client: where a weight may be after each step."""

    def __call__(self, name: str, value: Tensor, brief: Brief) -> Tensor:
        """The nearest allowed value."""
        ...


class Evidence(Protocol):
    """Client: what it sends beside its weights, and what that reveals; it also tells the door what to expect."""

    @property
    def name(self) -> str:
        """The first part of every note's name; what aggregators and steps list in `needs`."""
        ...

    @property
    def reveals(self) -> str:
        """What leaves the client, in plain words; empty if nothing does."""
        ...

    def __call__(self, local: Local) -> Params:
        """The notes of a trained client, named "name/…"; may write the client's memory."""
        ...

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """The notes the door lets through, with their forms."""
        ...

    def check(self, notes: Params, mass: float) -> Flaw | None:
        """What is wrong with the values of well-formed notes, if anything."""
        ...

    def geometry(self, notes: Params) -> Geometry | None:
        """The posterior's geometry, if these notes describe one."""
        ...


class Aggregator(Protocol):
    """Server: the cohort becomes the next model."""

    @property
    def needs(self) -> frozenset[str]:
        """Evidence names it reads; "server_rows", "unlabelled" and "start" stand for what the server has."""
        ...

    @property
    def laws(self) -> frozenset[str]:
        """The laws of the common suite that it keeps."""
        ...

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Fuse the cohort."""
        ...


class ServerStep(Protocol):
    """Server: something done to the fused model."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Take the step."""
        ...


class Engine(Protocol):
    """Where clients live: on this machine, on a federation, in files."""

    @property
    def clients(self) -> tuple[str, ...]:
        """Everybody who could be asked."""
        ...

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterable[Envelope]:
        """Send the brief to the asked clients; bring back what they answer, in any order."""
        ...


class Roster(Protocol):
    """Server: who answers."""

    def __call__(self, engine: Engine, bench: Bench) -> Engine:
        """The engine, perhaps with more clients in it."""
        ...


class Dress(Protocol):
    """Beside the seams: the network a method trains, made of the network the user chose."""

    def __call__(self, start: Single, classes: int, seed: int) -> Single:
        """The start with the layers or outputs the method needs; one that has them already stays as it is."""
        ...


class Opening(Protocol):
    """Beside the seams: what a server does once, before it first speaks to a client."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    def __call__(self, state: ServerState, bench: Bench) -> ServerState:
        """The state the first round begins with."""
        ...


Result: TypeAlias = Literal["single", "mixture", "apart"]


@runtime_checkable
class ChangesResult(Protocol):
    """An aggregator or step after which the model is not what it was: a mixture, or a single one again."""

    @property
    def result(self) -> Result:
        """The kind of model it leaves."""
        ...


@runtime_checkable
class Choosy(Protocol):
    """An aggregator or step that cannot work on every network, or not in every run."""

    def fits(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:
        """Say before anybody trains what could not work.

        Args:
            networks: the network of each client that has one of its own, and under "" everybody else's.
            bench: what the server has.
            rounds: how many there will be.

        Raises:
            ConfigError: with one sentence that names the remedy.
        """
        ...


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The plain objective: mean cross entropy of the batch."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        """Mean over the batch of −log softmax(z)_y."""
        return F.cross_entropy(local.predict(batch[0]), batch[1])


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

    def __call__(self, engine: Engine, bench: Bench) -> Engine:  # noqa: ARG002 - the seam's signature
        """The engine as it is."""
        return engine


@dataclass(frozen=True, slots=True)
class Plain:
    """The network as the user chose it."""

    def __call__(self, start: Single, classes: int, seed: int) -> Single:  # noqa: ARG002 - the seam's signature
        """The start as it is."""
        return start


@dataclass(frozen=True, slots=True)
class AsItIs:
    """Nothing comes before the first round."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002 - the seam's signature
        """The state as it is."""
        return state


@dataclass(frozen=True, slots=True)
class Work:
    """The client half of a recipe with its settings: with brief, rows and seed it fixes the reply to the last bit."""

    settings: LocalSettings = field(default_factory=LocalSettings)
    objective: Objective = field(default_factory=CrossEntropy)
    view: View = field(default_factory=OwnRows)
    project: Project = field(default_factory=Free)
    evidence: tuple[Evidence, ...] = ()

    @property
    def key(self) -> str | None:
        """Canonical text of the work, or None if a part has no stable one (a lambda, say)."""
        text = repr(self)
        return None if " at 0x" in text else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A method: the seven seams filled, checked to fit each other.

    Example:
        >>> from fedfuse.server.aggregate.mean import NormalisedMean
        >>> Recipe(name="nova", aggregate=NormalisedMean()).result
        'single'
    """

    aggregate: Aggregator
    name: str = ""
    label: str = ""
    objective: Objective = field(default_factory=CrossEntropy)
    view: View = field(default_factory=OwnRows)
    project: Project = field(default_factory=Free)
    evidence: tuple[Evidence, ...] = ()
    steps: tuple[ServerStep, ...] = ()
    publishes: tuple[str, ...] = ()
    roster: Roster = field(default_factory=ClientsOnly)
    dress: Dress = field(default_factory=Plain)
    opening: Opening = field(default_factory=AsItIs)
    later: tuple[int, Recipe] | None = None

    def __post_init__(self) -> None:
        given = {e.name for e in self.evidence} | {"server_rows", "unlabelled", "start"}
        asked = self.needs
        if missing := sorted(asked - given):
            hint = difflib.get_close_matches(missing[0], given, n=1)
            also = f" (did you mean {hint[0]!r}?)" if hint else ""
            raise RecipeError(
                f"recipe {self.name or 'without a name'!r}: nobody sends {', '.join(missing)}{also}; "
                "add the evidence or drop the part that needs it"
            )

    @property
    def needs(self) -> frozenset[str]:
        """Everything its aggregator and steps read, its roster and its opening."""
        roster: frozenset[str] = getattr(self.roster, "needs", frozenset())
        return self.aggregate.needs.union(roster, self.opening.needs, *(s.needs for s in self.steps))

    @property
    def result(self) -> Result:
        """The kind of model a round ends with."""
        parts = [p for p in (self.aggregate, *self.steps) if isinstance(p, ChangesResult)]
        return parts[-1].result if parts else "single"

    @property
    def reveals(self) -> tuple[str, ...]:
        """What leaves a client beside its weights, or a server for its clients."""
        lent: str = getattr(self.roster, "reveals", "")
        return tuple(words for words in (lent, *(e.reveals for e in self.evidence)) if words)

    def work(self, settings: LocalSettings) -> Work:
        """The client half."""
        return Work(settings, self.objective, self.view, self.project, self.evidence)

    def dressed(self, state: ServerState, bench: Bench) -> ServerState:
        """The state a run of this recipe begins with: the model and every client's own start, dressed.

        Raises:
            ConfigError: if the network cannot be dressed.
        """
        if isinstance(self.dress, Plain):
            return state
        starts = {
            client: self._dress(Single(s.spec, Posterior(s.params)), bench, client)
            for client, s in state.starts.items()
        }
        own = {client: Start(s.spec, s.posterior.mean) for client, s in starts.items()}
        model = self._dress(state.model, bench) if isinstance(state.model, Single) else state.model
        return replace(state, model=model, starts=own)

    def opened(self, state: ServerState, bench: Bench) -> ServerState:
        """The state a round begins with: before the first one, the recipe opens."""
        return self.opening(state, bench) if state.round == 0 else state

    def _dress(self, start: Single, bench: Bench, *whose: str) -> Single:
        return self.dress(start, bench.classes, seed_for(bench.seed, "dress", *whose))

    def at(self, round_: int) -> Recipe:
        """The recipe in force in a round: `then` can hand over to another."""
        if self.later is None or round_ < self.later[0]:
            return self
        return self.later[1].at(round_)

    def then(self, after: int, recipe: Recipe) -> Recipe:
        """This recipe for the first `after` rounds, another one from there on."""
        if after < 1:
            raise RecipeError(f"recipe {self.name!r}: it must run at least one round before the next, got {after}")
        label = f"{self.label or self.name}→{recipe.label or recipe.name}"
        return replace(self, later=(after, recipe), label=label)

    def check(self, rounds: int, bench: Bench, state: ServerState | None = None) -> None:
        """Say before any training what could not work: missing server rows, rounds after a mixture, a wrong network.

        Args:
            rounds: how many there will be.
            bench: what the server has.
            state: what the run begins with, if that is known; its networks must suit every part.

        Raises:
            RecipeError: with one sentence that names the recipe and the remedy.
            ConfigError: likewise, from a part that does not fit the network.
        """
        now: Recipe | None = self
        while now is not None:
            ends = now.later[0] if now.later else rounds
            if now.result == "mixture" and (ends > 1 or now.later):
                raise RecipeError(
                    f"recipe {now.name!r} ends a round with a mixture of networks, which cannot be trained further; "
                    "use rounds = 1 or add a distillation step"
                )
            if "server_rows" in now.needs:
                bench.need_rows(f"recipe {now.name!r}")
            if "unlabelled" in now.needs:
                bench.need_unlabelled(f"recipe {now.name!r}")
            if state is not None and state.round == 0:
                now._check_parts(rounds, bench, state)
            now = now.later[1] if now.later and now.later[0] < rounds else None

    def _check_parts(self, rounds: int, bench: Bench, state: ServerState) -> None:
        networks = {"": state.start.spec} | {client: start.spec for client, start in state.starts.items()}
        for part in (self.aggregate, *self.steps):
            if isinstance(part, Choosy):
                part.fits(networks, bench, rounds)
