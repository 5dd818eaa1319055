"""Guards: filters that can stand before any aggregator and turn a cohort into a safer or a private one.

Against clients that poison: `NormClip`, `Krum`, `CoordinateMedian`, `TrimmedMean`. Against what the model tells of any
one client: `ClientNoise` (differential privacy), and `ChartNoise` for means that are taken in other coordinates.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.params import Params, squared_distance
from fedfuse.core.recipe import Recipe
from fedfuse.core.rng import stream
from fedfuse.core.seams import Guard, ServerPart
from fedfuse.core.settings import MoveNoise
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.privacy import released_epsilon, sampled_epsilon
from fedfuse.server.admission.influence import brought_moves, tells_precision
from fedfuse.server.aggregate.adaptive import ServerOptimizer
from fedfuse.server.aggregate.charts import Chart, MeanIn, Pair
from fedfuse.server.aggregate.mean import BLOCK, Mean, mean_by_examples
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

# What still holds behind a filter: one client may be moved, and examples no longer weigh as they did.
_LAWS = frozenset({"order", "agree", "pure", "dtype", "finite", "repeat"})


@dataclass(frozen=True, slots=True)
class NormClip(ServerPart):
    """No client may move further than `limit`, or than `ratio` times the median move: w_k ← w₀ + s_k (w_k − w₀)."""

    limit: float | None = None
    ratio: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"start"})
    laws: ClassVar[frozenset[str]] = _LAWS

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:
        """Shorten the long moves; weights are rescaled as they are read, so nothing is copied."""
        start = state.single.posterior.mean
        moves = [math.sqrt(squared_distance(u.posterior.mean, start)) for u in cohort]
        limit = self.limit if self.limit is not None else self.ratio * float(torch.tensor(moves).median())
        factors = [min(1.0, limit / move) if move > 0 else 1.0 for move in moves]
        return Cohort(tuple(shorten_move(u, start, f) if f < 1 else u for u, f in zip(cohort, factors, strict=True)))


def shorten_move(update: ClientUpdate, start: Params, factor: float) -> ClientUpdate:
    """The update at w₀ + factor (w_k − w₀); weights are rescaled as they are read, counters stay as they are."""
    mean = update.posterior.mean

    def fetch(name: str, begin: int, end: int) -> Tensor:
        theirs, ours = piece_of(mean, name, begin, end), piece_of(start, name, begin, end)
        return torch.lerp(ours, theirs, factor) if theirs.is_floating_point() else theirs

    return replace(update, posterior=replace(update.posterior, mean=LazyParams(forms_of(mean), fetch)))


@dataclass(frozen=True, slots=True)
class Krum(ServerPart):
    """Keep the `keep` clients whose n − f − 2 nearest neighbours are nearest (Blanchard et al. 2017; Multi-Krum).

    Distances are taken in the space that is fused in: between moves, each counted by how sure its client says it is
    (`brought_moves`), and, in units of its own, between what else came with them (controls, losses, …). So a client
    that claims to be very sure where it moved stands as far away as one that moved far, and a client that is unlike the
    others in its evidence alone does not.
    """

    byzantine: int = 1
    keep: int | None = None
    needs: ClassVar[frozenset[str]] = frozenset()
    laws: ClassVar[frozenset[str]] = _LAWS

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:  # noqa: ARG002 - the seam's signature
        """Drop the clients that stand far from all others."""
        n, near = len(cohort), len(cohort) - self.byzantine - 2
        if near < 1:
            raise RecipeError(
                f"Krum with {self.byzantine} byzantine clients needs at least {self.byzantine + 3} updates, got {n}"
            )
        distances = _pairwise(cohort).sort(1).values[:, 1 : near + 1].sum(1)  # the nearest of all is itself
        keep = min(self.keep or n - self.byzantine, n)
        best = sorted(distances.argsort(stable=True)[:keep].tolist())
        return Cohort(tuple(cohort.updates[i] for i in best))


_FAR = 1e300  # where a distance overflows
# Distances of evidence count for at most twice the median distance: honest evidence differs by decades, and without a
# limit an honest client with unusual evidence stood further away than one with poisoned weights, which was kept.
_EVIDENCE_COUNTS = 2.0


def _pairwise(cohort: Cohort) -> Tensor:
    """Squared distances between what clients bring to the fusion, and between other evidence in units of its median."""
    moved = torch.zeros(len(cohort), len(cohort), dtype=torch.float64)
    for _, moves in brought_moves(cohort):
        moved += _distances(moves)
    total = _in_units(moved)
    for kind in dict.fromkeys(name.partition("/")[0] for update in cohort for name in update.notes):
        total = total + _in_units(_evidence_distances(cohort, kind)).clamp(max=_EVIDENCE_COUNTS)
    return total


def _evidence_distances(cohort: Cohort, kind: str) -> Tensor:
    """Squared distances between what clients sent as one kind of evidence, each tensor by its median length.

    What tells how sure they are of their weights has been counted with those.
    """
    total = torch.zeros(len(cohort), len(cohort), dtype=torch.float64)
    first, geometry = cohort.updates[0].notes, cohort.updates[0].posterior.geometry
    for name in (name for name in first if name.partition("/")[0] == kind and not tells_precision(geometry, name)):
        each = [update.notes.get(name) for update in cohort]
        if not all(t is not None and t.shape == first[name].shape and t.is_floating_point() for t in each):
            continue  # ranks may differ, and a client without a layer's evidence has no say in it
        stack = torch.stack([t.double().reshape(-1) for t in each if t is not None])
        lengths = torch.linalg.vector_norm(stack, dim=1)
        total += _distances(stack / max(float(lengths.median()), 1e-300))
    return total


def _distances(rows: Tensor) -> Tensor:
    # By differences and not by |x|² + |y|² − 2xy, which cancels to noise for clients that are close to each other.
    rows = rows.double()
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()


def _in_units(distances: Tensor) -> Tensor:
    """Distances divided by the median of those between two clients, so that kinds of evidence can be added."""
    finite = distances.nan_to_num(nan=_FAR, posinf=_FAR)
    between = finite[torch.ones_like(finite).triu(1).bool()]
    unit = float(between.median()) or float(between.max())  # the median is 0 where most agree
    return finite / unit if unit > 0 else finite


@dataclass(frozen=True, slots=True)
class CoordinateMedian(ServerPart):
    """Every coordinate is the median over clients (Yin et al. 2018)."""

    needs: ClassVar[frozenset[str]] = frozenset()
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = _LAWS

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:  # noqa: ARG002 - the seam's signature
        """Hand the median to all."""
        return _with_common_mean(cohort, lambda values: torch.quantile(values, 0.5, dim=0))


@dataclass(frozen=True, slots=True)
class TrimmedMean(ServerPart):
    """Every coordinate is the mean over clients without the `trim` share of largest and of smallest values."""

    trim: float = 0.1
    needs: ClassVar[frozenset[str]] = frozenset()
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = _LAWS

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:  # noqa: ARG002 - the seam's signature
        """Hand the trimmed mean to all."""
        num_trimmed = int(self.trim * len(cohort))
        if not 0 <= self.trim < 0.5:
            raise RecipeError(f"the trimmed mean cuts a share in [0, 0.5) from each side, got {self.trim}")
        return _with_common_mean(
            cohort, lambda values: values.sort(0).values[num_trimmed : len(values) - num_trimmed].mean(0)
        )


def _with_common_mean(cohort: Cohort, centre: Callable[[Tensor], Tensor]) -> Cohort:
    # All get the common centre: the aggregator behind it then gives it back, whatever its weights are.
    common = {}
    for name in cohort.names:
        stack = cohort.stack(name)
        if not stack.is_floating_point():
            common[name] = mean_by_examples(cohort, name)
            continue
        flat, out = stack.reshape(len(stack), -1), torch.empty_like(stack[0]).flatten()
        for begin in range(0, flat.shape[1], BLOCK):
            part = flat[:, begin : begin + BLOCK].double()
            out[begin : begin + part.shape[1]] = centre(part)
        common[name] = out.view(stack.shape[1:])
    return Cohort(tuple(replace(u, posterior=replace(u.posterior, mean=common)) for u in cohort))


_ROUNDS = "privacy_of_clients"  # the kind of server memory that has Σ μ² about whole clients


@dataclass(frozen=True, slots=True)
class ClientNoise(ServerPart):
    """DP-FedAvg: moves are shortened to C, clients weigh alike, and their mean gets noise N(0, (zC/K)²).

    One client more or less, its place left empty among K, moves the mean by C/K at most, so a round is a Gaussian
    release of signal 1/z, and T rounds are one of √T/z. The noise of the mean is added to one update, K times as
    large, since it is the mean that is fused. It holds for methods that fuse by a mean of weights and ask for
    nothing else (McMahan et al., ICLR 2018); means in a chart are taken there (`ChartNoise`). Where each client
    takes part by a coin with probability q, K is qN, the number expected and not how many came, which tells of coins.
    With noise at the server, its operator sees what clients send. With at = "clients" they have shortened and
    disturbed their moves themselves (`local.private`), and the server only lets them weigh alike and adds up what that
    costs.

    Attributes:
        clip: C.
        noise: z, the noise over the sensitivity.
        delta: the δ at which ε is reported.
        seed: draw the noise from this seed, for simulations alone; else it comes from the operating system.
        at: who adds the noise.
        participation: q, 1 where no coins are thrown; a run says it (`drawn_by`).
        population: N.
    """

    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5
    seed: int | None = None
    at: Literal["server", "clients"] = "server"
    participation: float = 1.0
    population: int = 0
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
        if self.at == "clients":
            return Cohort(tuple(replace(update, num_examples=1.0) for update in cohort))
        share = len(cohort) / self.divisor(cohort)
        updates = [replace(self._shorten(update, start, share), num_examples=1.0) for update in cohort]
        return Cohort((self._disturb(updates[0], state, share), *updates[1:]))

    def drawn_by(self, bench: Bench) -> Self:
        """The guard of a run that asks clients in this way.

        Raises:
            ConfigError: if clients add the noise, whose number must be agreed on, and coins decide it.
        """
        if bench.participation == 1.0:
            return self
        if self.at == "clients":
            raise ConfigError(
                "the guard 'private' with at = 'clients' needs the number of clients that was agreed on, and "
                "participation leaves it to coins; let the server add the noise"
            )
        return replace(self, participation=bench.participation, population=bench.population)

    def divisor(self, cohort: Cohort) -> float:
        """K: how many clients the sum of a round is divided by."""
        return len(cohort) if self.participation == 1.0 else self.participation * self.population

    def epsilon(self, square: float, rounds: int) -> tuple[float | None, float]:
        """ε of rounds whose signals' squares add up to a number, and its δ; None where nothing hides a client.

        With coins it is `sampled_epsilon`. A round in which all coins say no is drawn again, which happens with
        probability (1 − q)^N and is added to δ.
        """
        if not math.isfinite(square):
            return None, self.delta
        if self.participation == 1.0:
            return released_epsilon(square, self.delta), self.delta
        found = sampled_epsilon(self.noise, self.participation, rounds, self.delta)
        again = rounds * (1 - self.participation) ** self.population
        return found, min(1.0, self.delta + (1 + math.exp(found)) * again)

    def signal(self, cohort: Cohort) -> float:
        """The signal μ of this round; infinite without noise.

        Raises:
            ConfigError: if clients were to add noise and one says that it did not, or not as the others.
        """
        if self.at == "server":
            return 1 / self.noise if self.noise else math.inf
        how = noise_of_clients(cohort)
        return how.clip / (how.sigma * math.sqrt(len(cohort)))  # of fewer than agreed, less noise is in the sum

    def account(self, cohort: Cohort, state: ServerState) -> ServerState:
        """The state with this round added to what the models so far tell of any one client."""
        before = entries_of(state.memory, _ROUNDS)
        square, rounds = (float(before.get(part, torch.zeros(()))) for part in ("square", "rounds"))
        square, rounds = square + self.signal(cohort) ** 2, rounds + 1
        told = {"square": torch.tensor(square, dtype=torch.float64), "rounds": torch.tensor(int(rounds))}
        epsilon, delta = self.epsilon(square, int(rounds))
        facts: dict[str, Any] = {"of": "a client", "epsilon": epsilon, "delta": delta, "rounds": int(rounds)}
        if self.at == "clients":  # what the server sees of each, and not of the sum
            alone = noise_of_clients(cohort)
            facts["epsilon_at_server"] = released_epsilon(rounds * (alone.clip / alone.sigma) ** 2, self.delta)
        return replace(state, memory={**state.memory, **with_kind(_ROUNDS, told)}).noting(privacy=facts)

    def fit_to(self, recipe: Recipe) -> ClientNoise | ChartNoise:
        """The guard for a method: itself before a mean of weights, in its chart before a mean there.

        Raises:
            RecipeError: naming a method that reads more, or whose sensitivity nothing bounds.
        """
        fuses = recipe.aggregate.then if isinstance(recipe.aggregate, ServerOptimizer) else recipe.aggregate
        if not recipe.evidence and isinstance(fuses, Mean):
            return self
        if isinstance(fuses, MeanIn) and not recipe.evidence:
            if not isinstance(fuses.chart, Chart):
                raise RecipeError(
                    f"the guard 'private' needs a mean whose sensitivity the length of a move bounds, and method "
                    f"{recipe.name!r} finds its barycenter by iteration; use eaa, gaa, aalv, wb or rklb"
                )
            if recipe.steps:
                raise RecipeError(
                    f"the guard 'private' hides any one client, and method {recipe.name!r} ends with a model for each; "
                    "set personal = 0"
                )
            return ChartNoise(self, fuses.chart)
        raise RecipeError(
            f"the guard 'private' hides one client in a mean of weights, and method {recipe.name!r} reads more "
            "than that; use fedavg, fedprox, moon, a mean in a chart such as wb, or a server optimizer such as fedadam"
        )

    def draw(self, round_: int) -> torch.Generator:
        """Where a round's noise comes from."""
        if self.seed is not None:
            return stream(self.seed, "privacy", round_)
        # A run's seed is in its files: noise drawn from it could be subtracted again by anyone who reads them.
        return torch.Generator().manual_seed(secrets.randbits(63))

    def _shorten(self, update: ClientUpdate, start: Params, share: float) -> ClientUpdate:
        move = math.sqrt(squared_distance(update.posterior.mean, start))
        factor = share * min(1.0, self.clip / move) if move else 1.0
        return update if factor == 1.0 else shorten_move(update, start, factor)

    def _disturb(self, update: ClientUpdate, state: ServerState, share: float) -> ClientUpdate:
        draw = self.draw(state.round)
        roles = update.spec.layout.roles
        mean: dict[str, Tensor] = {}
        for name, tensor in update.posterior.mean.items():
            mean[name] = tensor
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
                drawn *= share * self.noise * self.clip
                mean[name] = (tensor.double() + drawn.to(tensor.device)).to(tensor.dtype)
            if roles.get(name) == "statistic" and name.endswith("running_var"):
                mean[name] = mean[name].clamp(min=0)
        return replace(update, posterior=replace(update.posterior, mean=mean))


def noise_of_clients(cohort: Cohort) -> MoveNoise:
    """How clients say they disturbed their moves, all of them alike.

    Raises:
        ConfigError: naming one who did not, or did otherwise.
    """
    told = {u.client: None if u.training is None else u.training.private for u in cohort}
    first = next(iter(told.values()))
    for client, how in told.items():
        if how is None or how != first:
            raise ConfigError(
                f"the guard 'private' with at = 'clients': {client} says {how or 'nothing'} of its noise, expected "
                f"{first or 'what local.private says'}; let all clients train with the same local.private"
            )
    assert first is not None
    return first


@dataclass(frozen=True, slots=True)
class ChartNoise(ServerPart):
    """The same in a chart: moves are measured, shortened and averaged in its coordinates, and the noise is added there.

    With φ a chart's coordinates, every client is φ(start) + min(1, C/‖d_k‖) d_k for d_k = φ(client) − φ(start): one
    client more or less moves their mean by C/K at most, whatever it sent. Everybody then stands at that mean with
    noise, so that the method's own mean gives it back; uncertainties that noise took too low are raised to a hundredth
    of the start's, which is done to what was released and costs no privacy.

    Attributes:
        of: C, z and δ.
        chart: where the mean is taken.
    """

    of: ClientNoise
    chart: Chart
    needs: ClassVar[frozenset[str]] = ClientNoise.needs
    laws: ClassVar[frozenset[str]] = ClientNoise.laws

    @property
    def delta(self) -> float:
        """The δ at which ε is reported."""
        return self.of.delta

    def signal(self, cohort: Cohort) -> float:
        """As in a mean of weights."""
        return self.of.signal(cohort)

    def drawn_by(self, bench: Bench) -> Self:
        """As in a mean of weights."""
        return replace(self, of=self.of.drawn_by(bench))

    def account(self, cohort: Cohort, state: ServerState) -> ServerState:
        """As in a mean of weights."""
        return self.of.account(cohort, state)

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:
        """Everybody at the noised mean in the chart."""
        if self.of.at == "clients":
            raise ConfigError(
                f"the guard 'private' with at = 'clients': clients disturb weights, and {self.chart} averages other "
                "coordinates; let the server add the noise, or fuse by fedavg"
            )
        start = state.single.posterior.mean
        pairs = cohort.updates[0].spec.layout.log_variances
        origin = _coordinates(self.chart, start, start, pairs)
        total = {name: torch.zeros_like(tensor) for name, tensor in origin.items()}
        for update in cohort:
            here = _coordinates(self.chart, update.posterior.mean, start, pairs)
            moves = {name: here[name] - tensor for name, tensor in origin.items()}
            length = math.sqrt(math.fsum(float(move.square().sum()) for move in moves.values()))
            share = min(1.0, self.of.clip / length) if length else 1.0
            total = {name: total[name] + share * move for name, move in moves.items()}
        draw = self.of.draw(state.round)
        sigma = self.of.noise * self.of.clip
        noised = {n: t + sigma * torch.randn(t.shape, generator=draw, dtype=torch.float64) for n, t in total.items()}
        mean = self._back({n: origin[n] + t / self.of.divisor(cohort) for n, t in noised.items()}, origin, start, pairs)
        mean = {name: mean.get(name, tensor) for name, tensor in cohort.updates[0].posterior.mean.items()}
        return Cohort(tuple(replace(u, posterior=replace(u.posterior, mean=mean), num_examples=1.0) for u in cohort))

    def _back(self, at: Params, origin: Params, start: Params, pairs: Mapping[str, str]) -> dict[str, Tensor]:
        """Weights and log-variances of coordinates."""
        found: dict[str, Tensor] = {}
        for name, first in at.items():
            if name in pairs.values():
                continue
            found[name] = first.to(start[name].dtype)
            if name in pairs:
                log = pairs[name]
                second = at[log]
                if self.chart.name != "AALV":  # a logarithm may be anything; the others are above zero
                    second = torch.maximum(second, origin[log].abs() / 100)
                mean, spread = self.chart.back(first.clone(), second.clone())
                mean = mean + start[name].double() if self.chart.centered else mean
                least = start[log].double() - math.log(100)
                found[log] = torch.maximum(self.chart.log(spread), least).to(start[log].dtype)
                found[name] = mean.to(start[name].dtype)
            elif name.endswith("running_var"):
                found[name] = found[name].clamp(min=0)
        return found


def _coordinates(chart: Chart, params: Params, start: Params, pairs: Mapping[str, str]) -> dict[str, Tensor]:
    """Every number of a network where the mean is taken: Bayesian layers in the chart, everything else as it is."""
    found = {n: t.double() for n, t in params.items() if t.is_floating_point() and n not in pairs.values()}
    for name, log in pairs.items():
        mean = found[name] - start[name].double() if chart.centered else found[name]
        pair: Pair = chart.to(mean, params[log].double())
        found[name], found[log] = pair
    return found


GUARDS: Mapping[str, type[Guard]] = {
    "clip": NormClip,
    "krum": Krum,
    "median": CoordinateMedian,
    "trimmed": TrimmedMean,
    "private": ClientNoise,
}
