"""A Recipe: a method as a value, the seams filled and checked to fit each other."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace

from fedfuse.core.messages import Start
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rng import seed_for
from fedfuse.core.seams import (
    NOT_EVIDENCE,
    Aggregator,
    Alignment,
    AsChosen,
    ClientsOnly,
    CrossEntropy,
    Evidence,
    FirstStep,
    Free,
    Guard,
    ModelPreparation,
    NothingBefore,
    Objective,
    OwnRows,
    Project,
    Result,
    Roster,
    ServerStep,
    View,
    Work,
)
from fedfuse.core.settings import LocalSettings
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import RecipeError


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
    align: Alignment | None = None
    guard: Guard | None = None
    steps: tuple[ServerStep, ...] = ()
    publishes: tuple[str, ...] = ()
    roster: Roster = field(default_factory=ClientsOnly)
    prepare_model: ModelPreparation = field(default_factory=AsChosen)
    before_first_round: FirstStep = field(default_factory=NothingBefore)
    later: tuple[int, Recipe] | None = None

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
        """Everything its alignment, guard, aggregator and steps read, its roster and its first step."""
        filters = (part.needs for part in (self.align, self.guard) if part is not None)
        return self.aggregate.needs.union(
            self.roster.needs, self.before_first_round.needs, *filters, *(s.needs for s in self.steps)
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
    def _parts(self) -> tuple[Aggregator | ServerStep, ...]:
        return (self.aggregate, *self.steps)

    @property
    def result(self) -> Result:
        """The kind of model a round ends with."""
        left = [part.result for part in self._parts if part.result is not None]
        return left[-1] if left else "single"

    @property
    def reveals(self) -> tuple[str, ...]:
        """What leaves a client beside its weights, or a server for its clients."""
        return tuple(words for words in (self.roster.reveals, *(e.reveals for e in self.evidence)) if words)

    def work(self, settings: LocalSettings) -> Work:
        """The client half."""
        return Work(settings, self.objective, self.view, self.project, self.evidence)

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

        Before the first round the recipe's own step is taken too.
        """
        prepared = self.prepare_models(state, bench)
        return self.before_first_round(prepared, bench) if state.round == 0 else prepared

    def _prepare(self, start: Single, bench: Bench, *whose: str) -> Single:
        return self.prepare_model(start, bench.classes, seed_for(bench.seed, "dress", *whose))  # the stream's name

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
        for part in self._parts:
            part.check_network(networks, bench, rounds)
