"""Masks: single weights held at zero, found by magnitude (IMC) or by what they are worth for their time (PruneFL)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.seams import TRAINING_PASSES, ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.errors import ConfigError
from fedfuse.nets.cost import MASK, count_server_work, density, layer_costs, training_passes
from fedfuse.nets.curvature import is_every_nth, maskable, squared_gradients
from fedfuse.server.aggregate.mean import weighted_mean
from fedfuse.server.inputs import input_form
from fedfuse.server.steps.prune import ExpectedRate, FixedRate, magnitude_threshold
from fedfuse.server.training import train_on

_TARGET = "target/rate"


@dataclass(frozen=True, slots=True)
class MagnitudeMask(ServerPart):
    """IMC: iterative magnitude pruning towards the rate that the inertial manifold's dimension suggests.

    The rate is found once, at the first pruning, as FedAP finds it; then the smallest weights of the fused model go in
    several steps, whole rounds apart, and training goes on between them. What is gone stays gone.

    Attributes:
        round: of the first pruning, counted from 0.
        every: rounds between two prunings.
        times: prunings in all.
        rate: the rate to be reached with the last one.
    """

    round: int
    every: int = 10
    times: int = 3
    rate: ExpectedRate = field(default_factory=FixedRate)

    @property
    def needs(self) -> frozenset[str]:
        """What its rate needs."""
        return self.rate.needs

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002 - the seam's signature
        """Say before training if the last pruning never comes.

        Raises:
            ConfigError: in one sentence.
        """
        last = self.round + (self.times - 1) * self.every
        if last >= rounds:
            raise ConfigError(
                f"weights are to be pruned for the last time after round {last + 1} and the run ends after {rounds}; "
                "lower `at`, `every` or `times`, or add rounds"
            )

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Prune, if it is time; tell how dense the network is."""
        state = self.rate.remember(state, cohort)
        done, off = divmod(state.round - self.round, self.every)
        if off or not 0 <= done < self.times:
            state = remask(state)
            return state.noting(density=density(state.single.posterior.mean, state.memory))
        if done == 0:
            target, facts = self.rate(state, cohort, bench)
            state = count_server_work(state, facts.pop("server_passes", 0.0), bench)
            memory = {**state.memory, _TARGET: torch.tensor(target, dtype=torch.float64)}
            state = replace(state, memory=memory).noting(pruned={"rate": target, **facts})
        rate = iterated_rate(float(state.memory[_TARGET]), done + 1, self.times)
        old, params = masks_of(state), state.single.posterior.mean
        new = magnitude_masks(params, tuple(old), rate)
        return apply_masks(state, {n: old[n] & m for n, m in new.items()})


def iterated_rate(target: float, done: int, times: int) -> float:
    """The share of weights gone after `done` of `times` prunings that each leave the same share of the rest.

    1 − (1 − p)^{done/times}: the usual schedule of iterative magnitude pruning.

    Example:
        >>> round(iterated_rate(0.75, 1, 2), 6), iterated_rate(0.75, 2, 2)
        (0.5, 0.75)
    """
    return 1.0 - float((1.0 - target) ** (done / times))


def magnitude_masks(params: Params, names: tuple[str, ...], rate: float) -> dict[str, Tensor]:
    """Masks that leave out the share `rate` of the named weights that is smallest in magnitude, over all of them.

    Example:
        >>> magnitude_masks({"w": torch.tensor([0.5, -0.1]), "v": torch.tensor([0.2, 3.0])}, ("w", "v"), 0.5)
        {'w': tensor([ True, False]), 'v': tensor([False,  True])}
    """
    threshold = magnitude_threshold([params[n] for n in names], rate)
    return {n: params[n].abs() > threshold if threshold else torch.ones_like(params[n]).bool() for n in names}


@dataclass(frozen=True, slots=True)
class Exchange:
    """PruneFL's reconfiguration: weights are traded for those that lower the loss more per unit of round time.

    From each layer's weights in force the share `drop` that is smallest in magnitude becomes a candidate; so are all
    masked ones. Candidates are taken in the order of Δ_j / t_j, the squared gradient for the time, while
    that exceeds Γ = Σ Δ / T of what is taken already, that is while Γ rises. The time of a round is modelled as
    T = c + Σ t_j: t_j is how often weight j is used per input, c a share `overhead` of what the whole network takes.

    Attributes:
        drop: the share of each layer that becomes a candidate for removal.
        overhead: c, as a share of the dense network's time.
    """

    drop: float = 0.3
    overhead: float = 0.1

    def __call__(
        self, params: Params, masks: Mapping[str, Tensor], worth: Params, times: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """The new masks."""
        secure = {n: self._secure_weights(params[n], m) for n, m in masks.items()}
        whole = sum(times[n] * m.numel() for n, m in masks.items())
        gain = sum(float(worth[n].double()[s].sum()) for n, s in secure.items())
        time = self.overhead * whole + sum(times[n] * int(s.sum()) for n, s in secure.items())
        ratio = torch.cat([(worth[n].double() / times[n])[~s] for n, s in secure.items()])
        cost = torch.cat([torch.full((int((~s).sum()),), float(times[n])).double() for n, s in secure.items()])
        chosen = select_while_rising(ratio, cost, gain, time)
        new = {}
        for name, flags in zip(secure, chosen.split([int((~s).sum()) for s in secure.values()]), strict=True):
            new[name] = secure[name].clone()
            new[name][~secure[name]] = flags
        return new

    def _secure_weights(self, weight: Tensor, mask: Tensor) -> Tensor:
        """The weights in force that are not candidates for removal; at least one of a layer."""
        active = int(mask.sum())
        stay = max(1, active - int(self.drop * active))
        score = torch.where(mask, weight.abs().double(), -1.0).flatten()
        secure = torch.zeros_like(mask).flatten()
        secure[score.sort(descending=True, stable=True).indices[:stay]] = True
        return secure.view_as(mask)


def select_while_rising(ratio: Tensor, cost: Tensor, gain: float, time: float) -> Tensor:
    """Which candidates are taken, in the order of Δ/t, while each raises Γ = gain / time.

    Example:
        >>> select_while_rising(torch.tensor([5.0, 1.0, 3.0]), torch.ones(3), gain=2.0, time=1.0)
        tensor([ True, False, False])
    """
    best = ratio.sort(descending=True, stable=True)
    costs = cost[best.indices]
    gains = torch.cat([torch.zeros(1).to(ratio), (best.values * costs).cumsum(0)[:-1]]) + gain
    times = torch.cat([torch.zeros(1).to(ratio), costs.cumsum(0)[:-1]]) + time
    rises = best.values * times > gains  # Δ/t above Γ of all before it
    stop = int((~rises).nonzero()[0]) if not bool(rises.all()) else len(rises)
    taken = torch.zeros_like(ratio, dtype=torch.bool)
    taken[best.indices[:stop]] = True
    return taken


@dataclass(frozen=True, slots=True)
class PruneFirst:
    """PruneFL's first stage: before the first round, the server finds a small network on rows of its own.

    It trains for some steps, trades weights, and begins again, until the density has changed by less than a tenth so
    many times in a row.

    Attributes:
        steps: of training between two trades.
        exchange: how weights are traded.
        change: a smaller relative change of the density is none.
        patience: so many of those in a row end the stage.
        most: trades in all, at most.
        batches: batches that squared gradients are a mean over.
    """

    steps: int = 50
    exchange: Exchange = field(default_factory=Exchange)
    change: float = 0.1
    patience: int = 5
    most: int = 50
    batches: int = 5
    needs: ClassVar[frozenset[str]] = frozenset({"server_rows", "training", "network"})

    def __call__(self, state: ServerState, bench: Bench) -> ServerState:
        """The state with a pruned network to begin with."""
        unchanged, before = 0, 1.0
        for turn in range(self.most):
            state = self._turn(state, bench, turn)
            now = density(state.single.posterior.mean, state.memory)
            unchanged = unchanged + 1 if abs(now - before) < self.change * before else 0
            before = now
            if unchanged == self.patience:
                break
        return state

    def _turn(self, state: ServerState, bench: Bench, turn: int) -> ServerState:
        spec, rows, who = state.single.spec, bench.need_rows("PruneFL's first stage"), f"server-{turn}"
        masks = masks_of(state)
        settings = bench.local.model_copy(update={"max_steps": self.steps, "epochs": self.steps})
        trained = train_on(rows, state, settings, bench, who)
        module = spec.build()
        module.load_state_dict(trained.params)
        draw, size = bench.stream("gradients", turn), bench.local.batch_size
        worth = squared_gradients(
            module, tuple(masks), rows, batch=size, batches=self.batches, generator=draw, task=bench.task
        )
        new = self.exchange(trained.params, masks, worth, times_of(spec, bench))
        looked_at = TRAINING_PASSES * self.batches * min(size, len(rows))
        state = count_server_work(state, training_passes(settings, len(rows), trained.steps) + looked_at, bench)
        return apply_masks(state.fused(trained.params), new)


@dataclass(frozen=True, slots=True)
class Reconfigure(ServerPart):
    """PruneFL's second stage: every `every` rounds the mask is traded, by the clients' mean squared gradients.

    Attributes:
        every: it happens in rounds every, 2·every, …, counted from 1, when clients send their squared gradients.
        exchange: how weights are traded.
        half_life: rounds after which only half as many weights become candidates.
    """

    every: int = 50
    exchange: Exchange = field(default_factory=Exchange)
    half_life: int = 10_000
    needs: ClassVar[frozenset[str]] = frozenset({"gradients", "network"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Trade, if it is time; tell how dense the network is."""
        if not is_every_nth(state.round, self.every):
            state = remask(state)
            return state.noting(density=density(state.single.posterior.mean, state.memory))
        masks, notes = masks_of(state), [u.notes for u in cohort]
        worth = {n: weighted_mean(notes, cohort.weights, f"gradients/{n}") for n in masks}
        trade = replace(self.exchange, drop=self.exchange.drop * 0.5 ** (state.round / self.half_life))
        times = times_of(state.single.spec, bench)
        return apply_masks(state, trade(state.single.posterior.mean, masks, worth, times))


def times_of(spec: Spec, bench: Bench) -> dict[str, int]:
    """How often each weight of a maskable tensor is used per input."""
    costs = layer_costs(spec, input_form(bench, spec).shape)
    layers = {name: name.rpartition(".")[0] for name in maskable(spec)}
    return {name: max(1, costs[layer].positions) if layer in costs else 1 for name, layer in layers.items()}


def masks_of(state: ServerState) -> dict[str, Tensor]:
    """The masks in force, all true where there are none yet."""
    params, known = state.single.posterior.mean, entries_of(state.memory, MASK)
    names = maskable(state.single.spec)
    return {n: known.get(n, torch.ones_like(params[n], dtype=torch.bool)) for n in names}


def apply_masks(state: ServerState, masks: Mapping[str, Tensor]) -> ServerState:
    """The state under these masks: the model's weights, and what clients will be told."""
    model = state.single
    mean = {n: t * masks[n].to(t) if n in masks else t for n, t in model.posterior.mean.items()}
    after = replace(state.fused(mean), memory={**state.memory, **with_kind(MASK, masks)})
    by_layer = {name.rpartition(".")[0]: float(m.double().mean()) for name, m in masks.items()}
    return after.noting(density=density(mean, after.memory), layer_density=by_layer)


def remask(state: ServerState) -> ServerState:
    """The state with its masks in force again, whatever has moved its weights since."""
    masks, model = entries_of(state.memory, MASK), state.single
    if not any(bool(model.posterior.mean[n][~m].any()) for n, m in masks.items()):
        return state
    return state.fused({n: t * masks[n].to(t) if n in masks else t for n, t in model.posterior.mean.items()})
