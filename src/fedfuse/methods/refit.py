"""Refit parts of a finished network to the rows of all clients, without training it again.

Three ways, each an ending that can stand behind any method (`refit = "head"`, `"layers"` or `"units"` in a file):

- the head: the last layer is fitted in closed form to the features below it, as `ridge` does (FedCGS, AAAI 2025; Fed3R,
  ICML 2024);
- the layers: before the head, all layers from the bottom up, one exchange each, by RegMean's equation on what a layer
  reads behind the layers already fused, M = (Σ f_k M_k Ã_k)(Σ f_k Ã_k)⁻¹ (RegMean++, `LayerAnswers`, `RefitLayers`);
- the units: hidden units are rescaled to the means and deviations they had in the clients' own networks (REPAIR, Jordan
  et al., ICLR 2023, `UnitEvidence`, `KeepUnitGoals`, `RepairUnits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedfuse.client.class_sums import Moments
from fedfuse.client.layer_inputs import input_factors
from fedfuse.client.objectives import KeepModel
from fedfuse.core.messages import Brief, Cohort, Flaw, Form
from fedfuse.core.params import Layer, Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method, method
from fedfuse.core.seams import ClientMemory, Effort, PlainEvidence, ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.factor import LowRank, as_stack
from fedfuse.linalg.psd import pack, packed_size
from fedfuse.linalg.ridge import shrink_moments, solve_moments
from fedfuse.linalg.subspace import times, written
from fedfuse.methods.ridge import USUAL, FitHead, HeadFit, ridge
from fedfuse.nets.head import TURN, block_in_turn, count_turns, turns_done
from fedfuse.nets.kronecker import Block, find_flaw, mean_eigenvalue_of, read_factor
from fedfuse.nets.units import (
    UNIT_TURN,
    UnitStatistics,
    layers_in_turn,
    mean_statistics,
    repairable_layers,
    rescalable_layers,
    rescale_units,
    turn_memory,
    unit_statistics,
)
from fedfuse.server.aggregate.mean import Mean
from fedfuse.wire.codec import forms_of

_IN, _ANSWERS = "layer/in", "layer/answers"


@dataclass(frozen=True, slots=True)
class LayerAnswers(PlainEvidence):
    """Ã = α A + (1 − α) diag(A) and M_k Ã of the layer whose turn it is, and at the head its `Moments`.

    A = Σ a aᵀ / N is of what the layer reads in the network of the brief, whose lower layers are fused already; M_k is
    the client's own layer, as it was trained. A client that has none answers by the brief's. Both are means over
    rows, so sums over clients suffice.

    Attributes:
        head: what is brought at the last layer.
        alpha: what A's off-diagonals are multiplied by.
        batch: rows per pass.
    """

    head: Moments = field(default_factory=Moments)
    alpha: float = 0.9
    batch: int = 256
    name: ClassVar[str] = "moments"
    recalls: ClassVar[tuple[ClientMemory, ...]] = (KeepModel(),)
    needs_one_target: ClassVar[bool] = True

    @property
    def reveals(self) -> str:
        """The head's, and one layer's in each exchange before."""
        return (
            "second moments of what every layer reads and their products with the client's own layer, averaged over "
            f"its rows; at the last layer {self.head.reveals}"
        )

    def __call__(self, local: Local) -> Params:
        """The layer's moments and answers at the brief's weights."""
        block = block_in_turn(local.brief.spec, local.brief.memory, self.head.layer)
        if block is None:
            return self.head(local)
        A = as_stack(input_factors(local.module, [block], local.rows.x, self.batch)[block.name])
        shrunk = torch.stack([shrink_moments(A[group], self.alpha) for group in range(block.groups)])
        own = {n: local.recall("last").get(n, local.module.state_dict()[n]) for n in block.tensors}
        layers = block.matrices({n: t.detach() for n, t in own.items()}).to(shrunk)
        answers = torch.stack([times(M, a) for M, a in zip(layers, shrunk, strict=True)])
        sent = shrunk.float()
        moments = {f"{_IN}/diagonal": sent.cpu()} if block.has_diagonal_inputs else {_IN: pack(sent).cpu()}
        return {**moments, _ANSWERS: answers.float().cpu()}

    def passes(self, effort: Effort) -> float:
        """A pass forward; the products of one layer are few in comparison."""
        return self.head.passes(effort)

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A triangle and a matrix per group, or the head's."""
        block = block_in_turn(brief.spec, brief.memory, self.head.layer)
        if block is None:
            return self.head.expects(brief)
        inn, out = block.sizes(forms_of(brief.params))
        form = {f"{_IN}/diagonal": inn} if block.has_diagonal_inputs else {_IN: packed_size(inn)}
        moments = {name: Form((block.groups, size), torch.float32) for name, size in form.items()}
        return {**moments, _ANSWERS: Form((block.groups, out, inn), torch.float32)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """Moments are positive semi-definite with a bounded trace; at the head what `Moments` says."""
        return find_flaw(notes, _IN) if _ANSWERS in notes else self.head.check(notes, num_examples)

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean eigenvalue of the moments, by which the answers are scaled too."""
        return {"layer": mean_eigenvalue_of(notes, _IN)} if _ANSWERS in notes else self.head.influence(notes)


@dataclass(frozen=True, slots=True)
class RefitLayers(ServerPart):
    """M = (Σ f_k M_k Ã_k)(Σ f_k Ã_k)⁻¹ for the layer whose turn it is, from `LayerAnswers`; the last one by `FitHead`.

    The moments Ã_k are of what the layer reads behind the layers already fused, so each layer is fitted to what it will
    really see. Directions in which no client has inputs keep the layer as it is.

    Attributes:
        head: how the last layer is fitted.
    """

    head: FitHead
    needs: ClassVar[frozenset[str]] = FitHead.needs
    only_sums: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = FitHead.laws

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Fit one layer, and pass the turn to the next."""
        update = cohort.updates[0]
        block = block_in_turn(update.spec, state.memory, self.head.layer)
        if block is None:
            return self.head(cohort, state, bench)
        params = {n: t.clone() for n, t in update.posterior.mean.items()}
        params |= block.split(self._fit(cohort, block), params)
        done = {f"{TURN}/done": torch.tensor(turns_done(state.memory) + 1)}
        fused = state.fused(params, spec=update.spec).noting(layer=block.name)
        return replace(fused, memory={**fused.memory, **done})

    def _fit(self, cohort: Cohort, block: Block) -> Tensor:
        """The layer's matrices, one per group."""
        now = block.matrices(cohort.updates[0].posterior.mean).double()
        moments: list[Tensor] = [torch.zeros((), dtype=torch.float64)] * block.groups
        answers = torch.zeros_like(now)
        for share, update in zip(cohort.weights.tolist(), cohort, strict=True):
            factor = read_factor(update.notes, "layer/in")
            if factor is None:
                raise ConfigError(f"{update.client} brings no moments of layer {block.name}; let it answer this round")
            stack = LowRank.diagonal(factor.rest) if isinstance(factor, LowRank) else as_stack(factor)
            moments = [total + share * written(stack[group]) for group, total in enumerate(moments)]
            answers += share * update.notes["layer/answers"].double()
        steps = [solve_moments(A, P - times(M, A)) for A, P, M in zip(moments, answers, now, strict=True)]
        return now + torch.stack(steps)

    @property
    def needs_classes(self) -> bool:
        """As the head does."""
        return self.head.needs_classes

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:
        """The head must be there, with one output per target."""
        self.head.check_network(networks, bench, rounds)


@dataclass(frozen=True, slots=True)
class UnitEvidence(PlainEvidence):
    """Mean or standard deviation of hidden units before their activation, over the client's rows and positions.

    They travel under the name of the unit's bias and have its shape, so an alignment moves them with their units.

    Attributes:
        what: which of the two; both are found in one pass.
        round: the round, counted from 0, whose replies bring those of every layer; None brings, whenever it is asked,
            those of the one layer whose turn it is.
    """

    what: Literal["mean", "std"] = "mean"
    round: int | None = None
    room: ClassVar[float] = 10.0  # a unit may be silent on one client's rows and busy on another's

    @property
    def name(self) -> str:
        """One kind of notes for means, one for deviations."""
        return f"unit_{self.what}"

    @property
    def reveals(self) -> str:
        """One number per unit."""
        words = "mean" if self.what == "mean" else "standard deviation"
        return f"the {words} of every hidden unit over the client's rows"

    def __call__(self, local: Local) -> Params:
        """A number per unit."""
        layers = self._layers(local.brief)
        found = local.once(f"units/{self.round}", lambda at: _measure(at, layers))
        return {f"{self.name}/{bias}": getattr(both, self.what).cpu() for bias, both in found.items()}

    def passes(self, effort: Effort) -> float:
        """A pass forward for both, counted with the means."""
        return 1.0 if self.what == "mean" and self.round in (None, effort.round) else 0.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A number per unit, under the name of its bias."""
        forms = forms_of(brief.params)
        biases = [layer.bias for layer in self._layers(brief) if layer.bias is not None]
        return {f"{self.name}/{bias}": Form(forms[bias].shape, torch.float64) for bias in biases}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """A deviation is not negative."""
        for name, values in notes.items():
            if name.startswith("unit_std/") and float(least := values.min()) < 0:
                return Flaw(name, float(least), "numbers ≥ 0")
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """How large they are: means and deviations are averaged over clients."""
        own = [values for name, values in notes.items() if name.startswith(f"{self.name}/")]
        return {self.name: float(torch.cat(own).square().mean().sqrt())} if own else {}

    def _layers(self, brief: Brief) -> list[Layer]:
        if self.round is None:
            return layers_in_turn(brief.spec, brief.memory)[:1]
        return rescalable_layers(brief.spec) if brief.round == self.round else []


def _measure(local: Local, layers: list[Layer]) -> dict[str, UnitStatistics]:
    """By the layers' biases."""
    if not layers:
        return {}
    found = unit_statistics(local.brief.spec, local.module.state_dict(), layers, local.rows.x)
    return {layer.bias: found[layer.name] for layer in layers if layer.bias is not None}


GOAL = "unit_goal"  # the kind of server memory that has the parents' means and deviations, one below the other


@dataclass(frozen=True, slots=True)
class KeepUnitGoals(ServerPart):
    """Remember μ* = Σ_k w_k μ_k and σ* = Σ_k w_k σ_k of every hidden unit, as the parents have them on their own rows.

    Attributes:
        round: the round, counted from 0, whose cohort are the parents.
    """

    round: int = 0
    needs: ClassVar[frozenset[str]] = frozenset({"unit_mean", "unit_std", "network"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """The model stays as it is."""
        if state.round != self.round:
            return state
        spec = state.single.spec  # layers run, and are repaired, in an order that only an input's shape can tell
        layers = rescalable_layers(spec) if bench.inputs is None else repairable_layers(spec, bench.inputs.shape)[0]
        goals = {f"{GOAL}/{layer.bias}": torch.stack(_mean_over_clients(cohort, layer)) for layer in layers}
        return replace(state, memory={**state.memory, **goals, **turn_memory(spec, layers)})


@dataclass(frozen=True, slots=True)
class RepairUnits(ServerPart):
    """Rescale the units of the layer whose turn it is to the parents' statistics (Jordan et al., "REPAIR", ICLR 2023).

    Client k says what a unit gives on its rows: μ_k and σ_k in its own network, kept by `KeepUnitGoals`, and m_k and
    s_k in the merged one. With r = Σ w_k σ_k / Σ w_k s_k the unit's weights become r W and its bias
    r (b − Σ w_k m_k) + Σ w_k μ_k, so that both averages are the parents' afterwards. Own and merged network are
    compared on the same rows: clients that agree leave the model as it is, however their rows differ, and clients with
    the same rows give what `Repair` does on those.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"unit_mean", "unit_std"})
    only_sums: ClassVar[bool] = True

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:  # noqa: ARG002
        """One layer, and the turn goes to the next."""
        single = state.single
        if f"{UNIT_TURN}/layers" not in state.memory:
            raise ConfigError(
                "nobody knows what the parents' hidden units gave, so none can be repaired; "
                'let clients train in the rounds before, by refit = "units" behind a method'
            )
        layers = layers_in_turn(single.spec, state.memory)
        if not layers:
            return state
        goal = UnitStatistics(*state.memory[f"{GOAL}/{layers[0].bias}"])
        now = _mean_over_clients(cohort, layers[0])
        params = {**single.posterior.mean, **rescale_units(layers[0], single.posterior.mean, now, goal)}
        fused = state.fused(params, single.posterior.geometry, single.spec).noting(layer=layers[0].name)
        return replace(fused, memory={**fused.memory, **turn_memory(single.spec, layers[1:])})


def _mean_over_clients(cohort: Cohort, layer: Layer) -> UnitStatistics:
    """Σ w_k μ_k and Σ w_k σ_k of a layer, by the clients' examples."""
    names, found = [f"unit_{what}/{layer.bias}" for what in ("mean", "std")], list[UnitStatistics]()
    for update in cohort:
        if missing := [name for name in names if name not in update.notes]:
            raise ConfigError(
                f"{update.client} brings no {missing[0]}: units that are blended have no statistics of their own; "
                "align by weights, activations or exact transport between equal widths"
            )
        found.append(UnitStatistics(*(update.notes[name] for name in names)))
    return mean_statistics(found, cohort.weights)


def _count_layers(network: Spec) -> int:
    """An exchange per layer; without any there is one, in which nothing happens."""
    return max(1, len(rescalable_layers(network)))


def _bring_statistics(before: Recipe, rounds: int) -> Recipe:
    """In their last round, the parents say what their own units give; alignments move that with the units."""
    last = rounds - 1
    evidence = (UnitEvidence("mean", last), UnitEvidence("std", last))
    return replace(before, evidence=before.evidence + evidence, steps=(*before.steps, KeepUnitGoals(last)))


@method("refit", paper="arXiv:2406.01116", family="statistics")
def refit(
    how: HeadFit = USUAL,
    layers: bool = False,
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.9,
    units: bool = False,
) -> Recipe:
    """Keep a network and fit its last layer in closed form to everybody's rows, in one exchange without training.

    It is `ridge` on the features of the network at hand, a fused one say; `refit = "head"` puts it behind any method.

    Args:
        how: which sums, and how the head is fitted to them.
        layers: before the last, fuse all other layers again from the bottom up, one exchange each: by regression on
            what each layer reads behind the layers already fused (RegMean++). Clients must have trained before.
        alpha: what off-diagonals of those layers' input moments are multiplied by.
        units: leave the last layer, and rescale hidden units without a norm to their means and deviations in the
            clients' own networks (REPAIR), one exchange per layer. Clients must have trained before.
    """
    if units:
        if layers or how != USUAL:
            raise RecipeError("refit: units are rescaled and no layer is fitted; leave out units or the other options")
        return Recipe(
            label="repair",
            trains=False,
            evidence=(UnitEvidence("mean"), UnitEvidence("std")),
            aggregate=Mean(),
            steps=(RepairUnits(),),
            publishes=(UNIT_TURN,),
            lasts=_count_layers,
            follows=_bring_statistics,
        )
    recipe = ridge("given", how)
    if not layers:
        return recipe
    if how.epsilon is not None:
        raise RecipeError("refit: the layers below the head are fused without noise; leave out epsilon or layers")
    return replace(
        recipe,
        evidence=(LayerAnswers(how.moments, alpha),),
        aggregate=RefitLayers(how.fit()),
        publishes=(TURN,),
        lasts=partial(count_turns, layer=how.layer),
    )


def refit_ending(said: str | Mapping[str, Any]) -> Recipe:
    """The recipe behind another method's last round that `refit` asks for in a file: a short word, or options.

    Example:
        >>> refit_ending("units") == refit_ending({"units": True})
        True
    """
    short: Mapping[str, Mapping[str, Any]] = {"head": {}, "layers": {"layers": True}, "units": {"units": True}}
    options = short[said] if isinstance(said, str) else said
    return find_method(refit.__name__).recipe(**options)
