"""Differential privacy of whole clients: moves of bounded length, and noise that hides any one of them."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.params import Params, squared_distance
from fedfuse.core.privacy import compose_signals, gaussian_epsilon
from fedfuse.core.recipe import Recipe
from fedfuse.core.rng import stream
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import ServerState
from fedfuse.errors import RecipeError
from fedfuse.server.aggregate.adaptive import ServerOptimizer
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.shorten import shorten_move


@dataclass(frozen=True, slots=True)
class ClientNoise(ServerPart):
    """DP-FedAvg: moves are shortened to C, clients weigh alike, and their mean gets noise N(0, (zC/K)²).

    One client more or less, its place left empty among K, moves the mean by C/K at most, so a round is a Gaussian
    release of signal 1/z, and T rounds are one of √T/z. The noise of the mean is added to one update, K times as
    large, since it is the mean that is fused. It holds for methods that fuse by a mean of weights and ask for
    nothing beside them (McMahan et al., ICLR 2018). Whoever runs the server sees what clients send.

    Attributes:
        clip: C.
        noise: z, the noise over the sensitivity.
        delta: the δ at which ε is told.
        seed: draw the noise from this seed, for simulations alone; else it comes from the operating system.
    """

    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5
    seed: int | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"start"})
    laws: ClassVar[frozenset[str]] = frozenset({"pure", "dtype", "finite"})

    def __post_init__(self) -> None:
        if not (self.clip > 0 and self.noise >= 0 and 0 < self.delta < 1):
            raise RecipeError(
                f"the guard 'private': clip is {self.clip}, noise {self.noise} and delta {self.delta}, expected clip > "
                "0, noise ≥ 0 and 0 < delta < 1"
            )

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:
        """Shorten the moves, let clients weigh alike, and put the noise on."""
        start = state.single.posterior.mean
        updates = [replace(self._shorten(update, start), num_examples=1.0) for update in cohort]
        return Cohort((self._disturb(updates[0], state), *updates[1:]))

    def facts(self, rounds: int) -> dict[str, Any]:
        """What so many rounds cost together: ε at δ, or none without noise."""
        epsilon = gaussian_epsilon(compose_signals([1 / self.noise] * rounds), self.delta) if self.noise else None
        return {"privacy": {"of": "a client", "epsilon": epsilon, "delta": self.delta, "rounds": rounds}}

    def check_recipe(self, recipe: Recipe) -> None:
        """Go on only with a method whose clients send weights alone and whose server takes their mean.

        Raises:
            RecipeError: naming the method.
        """
        fuses = recipe.aggregate.then if isinstance(recipe.aggregate, ServerOptimizer) else recipe.aggregate
        if recipe.evidence or not isinstance(fuses, Mean):
            raise RecipeError(
                f"the guard 'private' hides one client in a mean of weights, and method {recipe.name!r} reads more "
                "than that; use fedavg, fedprox, moon or a server optimizer such as fedadam"
            )

    def _shorten(self, update: ClientUpdate, start: Params) -> ClientUpdate:
        move = math.sqrt(squared_distance(update.posterior.mean, start))
        return shorten_move(update, start, self.clip / move) if move > self.clip else update

    def _disturb(self, update: ClientUpdate, state: ServerState) -> ClientUpdate:
        draw = stream(self.seed, "privacy", state.round) if self.seed is not None else _secret_stream()
        roles = update.spec.layout.roles
        mean: dict[str, Tensor] = {}
        for name, tensor in update.posterior.mean.items():
            mean[name] = tensor
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=draw, dtype=torch.float64) * (self.noise * self.clip)
                mean[name] = (tensor.double() + drawn.to(tensor.device)).to(tensor.dtype)
            if roles.get(name) == "statistic" and name.endswith("running_var"):
                mean[name] = mean[name].clamp(min=0)
        return replace(update, posterior=replace(update.posterior, mean=mean))


def _secret_stream() -> torch.Generator:
    return torch.Generator().manual_seed(secrets.randbits(63))
