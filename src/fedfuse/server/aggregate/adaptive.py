"""The server as an optimizer: the cohort's mean move is a gradient for momentum, Adam or Yogi."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.recipe import weighs_by
from fedfuse.core.seams import Aggregator, ServerPart
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.server.aggregate.mean import Mean


@dataclass(frozen=True, slots=True)
class ServerOptimizer(ServerPart):
    """Reddi et al. 2021: Δ = fused − w; then a momentum, Adam, Yogi or Adagrad step along Δ.

    momentum: m ← β₁ m + Δ;                     w ← w + η m
    others:   m ← β₁ m + (1 − β₁) Δ;            w ← w + η m / (√v + τ), with v starting at τ² and
    adam:     v ← β₂ v + (1 − β₂) Δ²
    yogi:     v ← v − (1 − β₂) Δ² sign(v − Δ²)
    adagrad:  v ← v + Δ²

    Buffers (running statistics, counters) are taken from the fused model as they are.
    """

    rule: Literal["momentum", "adam", "yogi", "adagrad"]
    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    then: Aggregator = field(default_factory=Mean)

    @property
    def needs(self) -> frozenset[str]:
        """A known start, and what the inner aggregator needs."""
        return self.then.needs | {"start"}

    @property
    def laws(self) -> frozenset[str]:
        """An optimizer moves on from the mean, so one client is not returned as it came."""
        return self.then.laws - {"one", "agree"}

    @property
    def only_sums(self) -> bool:
        """As the inner aggregator: the step is taken along what that gives."""
        return self.then.only_sums

    @property
    def sums_by(self) -> str | None:
        """As the inner aggregator."""
        return weighs_by(self.then)

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Fuse, then step from the old model along the move."""
        old, fused = state.single.posterior.mean, self.then(cohort, state, bench)
        new = dict(fused.single.posterior.mean)
        firsts, seconds = entries_of(state.memory, "first"), entries_of(state.memory, "second")
        for name in fused.single.spec.layout.with_role("weight", "bias", "norm"):
            move = new[name].double() - old[name].double()
            first, second = firsts.get(name), seconds.get(name)
            step, firsts[name], seconds[name] = self._step(move, first, second)
            new[name] = (old[name].double() + self.lr * step).to(new[name].dtype)
        memory = {**state.memory, **with_kind("first", firsts), **with_kind("second", seconds)}
        return replace(fused.fused(new), memory=memory, facts=fused.facts)

    def _step(self, move: Tensor, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        m = torch.zeros_like(move) if first is None else first
        v = torch.full_like(move, self.tau**2) if second is None else second
        if self.rule == "momentum":
            m = self.beta1 * m + move
            return m, m, v
        m = self.beta1 * m + (1 - self.beta1) * move
        square = move.square()
        if self.rule == "adam":
            v = self.beta2 * v + (1 - self.beta2) * square
        elif self.rule == "yogi":
            v = v - (1 - self.beta2) * square * torch.sign(v - square)
        else:
            v = v + square
        return m / (v.sqrt() + self.tau), m, v
