"""A Recipe: a method as a value, the seams filled and checked to fit each other."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, runtime_checkable

from fedfuse.core.messages import Form, Start
from fedfuse.core.model import Single
from fedfuse.core.params import Layout
from fedfuse.core.posterior import Posterior
from fedfuse.core.rng import seed_for
from fedfuse.core.seams import (
    NOT_EVIDENCE,
    Aggregator,
    Alignment,
    ClientMemory,
    ClientsOnly,
    Evidence,
    Free,
    Guard,
    Objective,
    OwnRows,
    Project,
    Result,
    Roster,
    ServerStep,
    TaskLoss,
    View,
    Work,
)
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import EXAMPLES, Bench, ServerState, tell_examples
from fedfuse.errors import RecipeError
from fedfuse.tasks import CLASSIFICATION, Classification, LanguageModel, Task


class ModelPreparation(Protocol):
    """The network a method trains, made of the network the user chose."""

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:
        """The start with the layers or outputs the method needs; one that has them already stays as it is."""

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:
        """In plain words, what a network of this layout lacks that the method would have given it; None if nothing."""


class FirstStep(Protocol):
    """What a server does once, before it first speaks to a client."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""

    def __call__(self, state: ServerState, bench: Bench) -> ServerState:
        """The state the first round begins with."""


@dataclass(frozen=True, slots=True)
class AsChosen:
    """The network as the user chose it."""

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:  # noqa: ARG002
        """The start as it is."""
        return start

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:  # noqa: ARG002
        """Nothing: any network will do."""
        return None


@dataclass(frozen=True, slots=True)
class NothingBefore:
    """Nothing comes before the first round."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002 - the seam's signature
        """The state as it is."""
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A method: the seams filled, checked to fit each other.

    A recipe that does not train asks clients for evidence at the weights they are sent: no client takes a step or
    sends weights back, and every update stands at the model of the brief.

    Where such a recipe ends a run, it takes one exchange, or as many as `lasts` says of the network, and its `follows`
    makes the recipe before it bring what it reads (see `ending`).

    Example:
        >>> from fedfuse.methods.fednova import NormalizedMean
        >>> Recipe(name="nova", aggregate=NormalizedMean()).result
        'single'
    """

    aggregate: Aggregator
    name: str = ""
    label: str = ""
    objective: Objective = field(default_factory=TaskLoss)
    view: View = field(default_factory=OwnRows)
    project: Project = field(default_factory=Free)
    evidence: tuple[Evidence, ...] = ()
    memory: tuple[ClientMemory, ...] = ()
    trains: bool = True
    align: Alignment | None = None
    guard: Guard | None = None
    steps: tuple[ServerStep, ...] = ()
    publishes: tuple[str, ...] = ()
    roster: Roster = field(default_factory=ClientsOnly)
    prepare_model: ModelPreparation = field(default_factory=AsChosen)
    before_first_round: FirstStep = field(default_factory=NothingBefore)
    later: tuple[int, Recipe] | None = None
    lasts: Callable[[Spec], int] | None = None
    follows: Callable[[Recipe, int], Recipe] | None = None

    def __post_init__(self) -> None:
        given = {e.name for e in self.evidence} | NOT_EVIDENCE
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
        """Everything its alignment, guard, aggregator and steps read, its roster and its first step.

        Without training it also needs the weights that clients stand at, for they do not send them.
        """
        filters = (part.needs for part in (self.align, self.guard) if part is not None)
        standing = frozenset[str]() if self.trains else frozenset({"start"})
        return self.aggregate.needs.union(
            standing, self.roster.needs, self.before_first_round.needs, *filters, *(s.needs for s in self.steps)
        )

    @property
    def laws(self) -> frozenset[str]:
        """The laws of the common suite that its fusion keeps, the server's steps aside."""
        filters = (part.laws for part in (self.align, self.guard) if part is not None)
        return self.aggregate.laws.intersection(*filters)

    @property
    def mixes_networks(self) -> bool:
        """Whether clients may have networks of different architectures or widths."""
        if self.align is not None:
            return self.align.mixes_networks
        return self.aggregate.mixes_networks and self.guard is None  # a guard compares weights

    @property
    def only_sums(self) -> bool:
        """Whether its server reads nothing of clients but sums over them, so that secure aggregation fits."""
        filtered = self.align is not None or self.guard is not None
        return not filtered and all(part.only_sums for part in self._parts)

    @property
    def sums_by(self) -> str | None:
        """By what clients weigh in the one sum its server reads of them, or None where it reads more than one sum."""
        more = not self.only_sums or (self.trains and self.evidence)
        return None if more else weighs_by(self.aggregate)

    @property
    def tensorwise(self) -> bool:
        """Whether what becomes of a tensor depends on that tensor alone, so that a model can be fused in parts."""
        return self._filters_by_tensor and all(part.tensorwise for part in self._parts)

    @property
    def layerwise(self) -> bool:
        """Whether what becomes of a layer depends on that layer and its evidence alone: parts are layers then."""
        return self._filters_by_tensor and all(part.layerwise for part in self._parts)

    @property
    def _filters_by_tensor(self) -> bool:
        return self.align is None and (self.guard is None or self.guard.tensorwise)

    @property
    def _parts(self) -> tuple[Aggregator | ServerStep, ...]:
        return (self.aggregate, *self.steps)

    @property
    def result(self) -> Result:
        """The kind of model a round ends with."""
        left = [part.result for part in self._parts if part.result is not None]
        return left[-1] if left else "single"

    @property
    def reveals(self) -> tuple[str, ...]:
        """What leaves a client in addition to its weights, or a server for its clients."""
        return tuple(words for words in (self.roster.reveals, *(e.reveals for e in self.evidence)) if words)

    def work(self, settings: LocalSettings) -> Work:
        """The client half.

        Raises:
            RecipeError: if there are no epochs and a part must know how clients trained.
        """
        if not settings.epochs and self.trains and "training" in self.needs:
            raise RecipeError(
                f"method {self.name!r} reads off the clients' training how far they moved, and there are no epochs; "
                "set local.epochs to 1 or more"
            )
        if settings.private is not None and (self.evidence or not self.trains):
            raise RecipeError(
                f"local.private hides a client in its move, and method {self.name!r} sends evidence beside it, which "
                "nothing would hide; use fedavg, fedprox, moon or a server optimizer such as fedadam"
            )
        return Work(settings, self.objective, self.view, self.project, self.evidence, self.memory, self.trains)

    def prepare_models(self, state: ServerState, bench: Bench) -> ServerState:
        """The state a run of this recipe begins with: the model and every client's own start, prepared.

        Raises:
            ConfigError: if the network cannot be prepared.
        """
        if isinstance(self.prepare_model, AsChosen):
            return state
        starts = {
            client: self._prepare(Single(s.spec, Posterior(s.params)), bench, client)
            for client, s in state.starts.items()
        }
        own = {client: Start(s.spec, s.posterior.mean) for client, s in starts.items()}
        model = self._prepare(state.model, bench) if isinstance(state.model, Single) else state.model
        return replace(state, model=model, starts=own)

    def begin_round(self, state: ServerState, bench: Bench) -> ServerState:
        """The state a round begins with: networks prepared, since a step may have left one unprepared.

        Before the first round the recipe's own step is taken too. Without training, all stand at the model itself,
        whatever starts of their own they had.
        """
        prepared = self.prepare_models(state if self.trains else replace(state, starts={}), bench)
        if EXAMPLES in self.publishes:
            prepared = replace(prepared, memory={**prepared.memory, **tell_examples(bench.num_examples)})
        return self.before_first_round(prepared, bench) if state.round == 0 else prepared

    def _prepare(self, start: Single, bench: Bench, *whose: str) -> Single:
        seed = seed_for(bench.seed, "dress", *whose)  # the stream's name
        return self.prepare_model(start, bench.classes, seed, bench.task)

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

    def ending(self, rounds: int, last: Recipe) -> Recipe:
        """This recipe for a run of so many rounds, and then one more exchange by another one.

        Example:
            >>> from fedfuse.core.registry import find_method
            >>> refitted = find_method("fedavg").recipe().ending(2, find_method("refit").recipe())
            >>> refitted.exchanges(2), refitted.at(1).name, refitted.at(2).name, refitted.label
            (3, 'fedavg', 'refit', 'fedavg+refit')
        """
        later = (rounds, last) if self.later is None else (self.later[0], self.later[1].ending(rounds, last))
        recalled = tuple(kept for kind in last.evidence for kept in kind.recalls if kept not in self.memory)
        return replace(
            self if last.follows is None else last.follows(self, rounds),
            later=later,
            memory=self.memory + recalled,
            label=f"{self.label or self.name}+{last.label or last.name}",
        )

    def exchanges(self, rounds: int, network: Spec | None = None) -> int:
        """How many exchanges a run of so many rounds takes: more where it ends with such that do not train.

        Args:
            rounds: of training.
            network: what is trained; without it, an ending takes one exchange.
        """
        now = self
        while now.later is not None:
            begins, now = now.later
            if begins == rounds and not now.trains:
                return rounds + (1 if now.lasts is None or network is None else now.lasts(network))
        return rounds

    def check_task(self, task: Task) -> None:
        """Say before any training that a part makes sense for classes only, or for one target per row.

        Raises:
            RecipeError: naming the part.
        """
        if isinstance(task, Classification):
            return
        if isinstance(task, LanguageModel) and (found := self._parts_with("needs_one_target")):
            raise RecipeError(
                f"recipe {self.name!r} fits a layer to one target per row ({found[0]} sums over them) and a language "
                "model has one at every character; use another method, or task = 'text-classification'"
            )
        if found := self._parts_with("needs_classes"):
            raise RecipeError(
                f"recipe {self.name!r} needs rows of one class each ({found[0]} counts or compares classes) and the "
                f"task is {task.name}; use another method, or task = 'classification'"
            )

    def check_inputs(self, bench: Bench) -> None:
        """Say before any training that a part makes, moves or weighs inputs, which tokens do not allow.

        Raises:
            RecipeError: naming the part.
        """
        if bench.holds_tokens and (found := self._parts_with("needs_numbers")):
            raise RecipeError(
                f"recipe {self.name!r} computes with inputs as numbers ({found[0]} does) and these are tokens, which "
                "have no scale and no slope; use another method, or inputs that are given rather than made"
            )

    def _parts_with(self, need: str) -> list[str]:
        parts = (self.objective, self.view, *self.evidence, self.align, self.guard, self.roster, self.prepare_model)
        return [type(p).__name__ for p in (*parts, self.before_first_round, *self._parts) if _has(p, need)]

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
        begins = 0
        while now is not None:
            ends = now.later[0] if now.later else rounds
            now.check_task(bench.task)
            now.check_inputs(bench)
            if now.result == "mixture" and (ends - begins > 1 or now.later):
                raise RecipeError(
                    f"recipe {now.name!r} ends a round with a mixture of networks, which cannot be trained further; "
                    "use rounds = 1, let it follow another method in the last round, or add a distillation step"
                )
            if "server_rows" in now.needs:
                bench.need_rows(f"recipe {now.name!r}")
            if "unlabelled" in now.needs:
                bench.need_unlabelled(f"recipe {now.name!r}")
            if state is not None and state.round == 0:
                now.check_networks(rounds, bench, state)
            now, begins = (now.later[1] if now.later and now.later[0] < rounds else None), ends

    def remarks(self, asked: int, bench: Bench) -> tuple[str, ...]:
        """What a user should know before training, of every part and of those of the recipes that take over."""
        later = self.later[1].remarks(asked, bench) if self.later else ()
        own = tuple(words for part in self._parts if (words := part.remark(asked, bench)))
        return tuple(dict.fromkeys((*own, *later)))

    def check_networks(self, rounds: int, bench: Bench, state: ServerState) -> None:
        """Say before any training which part does not fit the networks, or cannot do its work in so many rounds.

        Raises:
            ConfigError: from the part.
            RecipeError: likewise.
        """
        networks = {"": state.start.spec} | {client: start.spec for client, start in state.starts.items()}
        for part in self._parts:
            part.check_network(networks, bench, rounds)


@runtime_checkable
class WeighsInSum(Protocol):
    """An aggregator that reads of its clients one sum, of weights or of evidence, and nothing else."""

    @property
    def sums_by(self) -> str | None:
        """By what clients weigh in it: "examples", alike as "clients", as their "evidence"; None where it is no sum."""


def weighs_by(aggregate: Aggregator) -> str | None:
    """By what clients weigh in the one sum that an aggregator reads, None if there is no such."""
    return aggregate.sums_by if isinstance(aggregate, WeighsInSum) else None


def _has(part: object, need: str) -> bool:
    """Whether a part has "needs_classes", "needs_numbers" or "needs_one_target"; what adds to a base has the base's."""
    base = getattr(part, "base", None)
    return bool(getattr(part, need, False)) or (base is not None and _has(base, need))
