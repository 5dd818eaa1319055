"""How much of a network may go: from spectra to one rate for all, and from that to a rate per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.effort import TRAINING_PASSES
from fedfuse.core.messages import Cohort
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.core.threads import one_thread
from fedfuse.linalg.lanczos import Spectrum
from fedfuse.nets.curvature import Curvature, CurvatureProbe, curvature_in
from fedfuse.server.labels import MissingCounts, divergence, population_histogram, record_label_counts
from fedfuse.server.training import common_training, train_on

RateRule: TypeAlias = Literal["plateau", "gap"]

_NEAR, _RUN = 0.005, 4  # so many shares in a row that differ by less make a plateau
_FIRST_STEP, _HALVINGS = 64, 40
_SMEAR = 1e-3  # of the spectrum's length: how far a Ritz value stands for its neighbours


def gap_rate(spectrum: Spectrum, lipschitz: float) -> float:
    """FedAP's expected rate: m/d for the first m with λ_{m+1} − λ_m > 4 𝓛, eigenvalues ascending.

    Below such a gap the loss is so flat beside its own non-linearity that those directions may go. With a spectrum by
    quadrature m/d is the weight of the values up to the gap. Without any such gap nothing may go, and the rate is 0.

    The paper calls d the rank of the Hessian. A rank by quadrature is a guess, so d is the number of parameters here,
    and eigenvalues at zero count among the m.

    Example:
        >>> four = Spectrum(torch.tensor([[0.0, 0.1, 0.2, 9.0]]), torch.full((1, 4), 0.25))
        >>> gap_rate(four, lipschitz=1.0), gap_rate(four, lipschitz=3.0)
        (0.75, 0.0)
    """
    values, order = spectrum.values.double().flatten().sort()
    weights = spectrum.weights.double().flatten()[order] / len(spectrum.weights)
    wide = (values.diff() > 4 * lipschitz).nonzero()
    return float(weights[: int(wide[0]) + 1].sum()) if len(wide) else 0.0


def plateau_rate(spectrum: Spectrum) -> float:
    """The share of eigenvalues below the first plateau of their distribution from zero on.

    From t = 0 upwards in equal steps the share above t is followed until four in a row differ by less than 0.005; the
    rate is the share below. Steps so wide that half of what lies above zero is passed unseen are halved, and the walk
    begins anew. Values are smeared over a thousandth of the spectrum's length, for a few of them stand for all.

    Example:
        >>> mostly_flat = Spectrum(torch.tensor([[-1.0, 0.5, 50.0]]), torch.tensor([[0.6, 0.3, 0.1]]))
        >>> round(plateau_rate(mostly_flat), 3)
        0.6
    """
    largest = float(spectrum.values.max())
    width = _SMEAR * (largest - float(spectrum.values.min()))
    above_zero = 1.0 - share_below(spectrum, 0.0, width)
    if largest <= 0 or above_zero <= 0:
        return 1.0 - above_zero
    step = largest / _FIRST_STEP
    for _ in range(_HALVINGS):
        found = _walk(spectrum, step, width, above_zero)
        if found is not None:
            return 1.0 - found
        step /= 2
    return 1.0 - above_zero


def _walk(spectrum: Spectrum, step: float, width: float, above_zero: float) -> float | None:
    """The share above the first plateau, or None if half of it went by before one was seen."""
    recent = [above_zero]
    t = 0.0
    while recent[-1] >= above_zero / 2:
        t += step
        recent = [*recent[-(_RUN - 1) :], 1.0 - share_below(spectrum, t, width)]
        if len(recent) == _RUN and all(abs(a - b) < _NEAR for a, b in pairwise(recent)):
            return recent[-1]
    return None


def share_below(spectrum: Spectrum, bound: float, width: float) -> float:
    """The share of eigenvalues up to a bound, each Ritz value smeared to a normal of this width.

    Example:
        >>> share_below(Spectrum(torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, 0.5]])), 0.0, width=0.1)
        0.25
    """
    if width <= 0:
        return spectrum.share_below(bound)
    below = torch.special.ndtr((bound - spectrum.values.double()) / width)
    return float((spectrum.weights.double() * below).sum() / len(spectrum.weights))


def combined_rate(
    rates: Sequence[float], num_examples: Sequence[float], divergences: Sequence[float], eps: float = 1e-4
) -> tuple[float, list[float]]:
    """Everybody's rate (eq. 6), p* = Σ_k w_k p_k with w_k ∝ n_k / (D(P_k) + ε), and the weights w_k.

    Example:
        >>> rate, weights = combined_rate([0.2, 0.6], num_examples=[30, 10], divergences=[0.1, 0.1])
        >>> round(rate, 6), [round(w, 6) for w in weights]
        (0.3, [0.75, 0.25])
    """
    raw = [n / (d + eps) for n, d in zip(num_examples, divergences, strict=True)]
    weights = [w / sum(raw) for w in raw]
    return math.fsum(w * p for w, p in zip(weights, rates, strict=True)), weights


def magnitude_threshold(weights: Sequence[Tensor], rate: float) -> float:
    """𝒱: the magnitude of the ⌊R p*⌋-th of all R weights in ascending order; 0 if that is none.

    Example:
        >>> round(magnitude_threshold([torch.tensor([0.1, -0.4]), torch.tensor([0.3, -0.2])], 0.75), 6)
        0.3
    """
    every = torch.cat([w.detach().flatten().abs() for w in weights])
    rank = math.floor(len(every) * rate + 1e-9)
    return float(every.kthvalue(rank).values) if rank else 0.0


def share_of_small(weights: Sequence[Tensor], threshold: float) -> float:
    """p_l: which share of some weights is smaller in magnitude than the threshold.

    Example:
        >>> share_of_small([torch.tensor([0.1, -0.4]), torch.tensor([0.3, -0.2])], 0.3)
        0.5
    """
    small = sum(int((w.abs() < threshold).sum()) for w in weights)
    return small / sum(w.numel() for w in weights)


class ExpectedRate(Protocol):
    """Which share of a network's weights may go."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    def remember(self, state: ServerState, cohort: Cohort) -> ServerState:
        """The state that remembers what the rate will need of this round."""
        ...

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> tuple[float, dict[str, Any]]:
        """The rate, and what a reader wants to know of it."""
        ...


@dataclass(frozen=True, slots=True)
class FixedRate(ServerPart):
    """A rate the user chose."""

    rate: float = 0.6
    needs: ClassVar[frozenset[str]] = frozenset()

    def remember(self, state: ServerState, cohort: Cohort) -> ServerState:  # noqa: ARG002 - the seam's signature
        """Nothing is needed."""
        return state

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> tuple[float, dict[str, Any]]:  # noqa: ARG002
        """The rate as it is."""
        return self.rate, {}


@dataclass(frozen=True, slots=True)
class SpectralRate(ServerPart):
    """FedAP's rate: everybody's own, from the spectrum of its curvature, combined by eq. 6.

    Participants are the clients of the round and the server, which trains the fused model on its rows to see the
    curvature there.

    Attributes:
        rule: how a rate is read off a spectrum.
        look: how closely the server looks at its own Hessian.
        eps: ε of eq. 6.
        unheard: what clients that never answered are taken to have.
    """

    rule: RateRule = "plateau"
    probe: CurvatureProbe = field(default_factory=CurvatureProbe)
    eps: float = 1e-4
    unheard: MissingCounts = "uniform"
    needs: ClassVar[frozenset[str]] = frozenset({"spectrum", "counts", "server_rows", "training", "network"})

    def remember(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Who has which labels."""
        return record_label_counts(state, cohort)

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> tuple[float, dict[str, Any]]:
        """p*, and everybody's own rate and weight."""
        rows = bench.need_rows("FedAP")
        everyone = population_histogram(state.memory, bench.population, self.unheard)
        curvatures = {u.client: curvature_in(u.notes) for u in cohort} | {"server": self._server(state, cohort, bench)}
        rates = {who: self.rate_of(curvature) for who, curvature in curvatures.items()}
        num_examples = [*(u.num_examples for u in cohort), float(len(rows))]
        counts = [*(u.notes["counts/labels"] for u in cohort), rows.counts(bench.classes)]
        divergences = [divergence(c, everyone) for c in counts]
        rate, weights = combined_rate(list(rates.values()), num_examples, divergences, self.eps)
        facts = {"rates": rates, "rate_weights": dict(zip(rates, weights, strict=True))}
        return rate, facts | {"server_passes": self._server_passes(cohort, bench)}

    def rate_of(self, curvature: Curvature) -> float:
        """One participant's rate."""
        return plateau_rate(curvature.spectrum) if self.rule == "plateau" else gap_rate(*curvature)

    def _server_passes(self, cohort: Cohort, bench: Bench) -> float:
        """Passes of single rows at the server: its training, and Hessian-vector products of twice a gradient's work."""
        rows, settings = len(bench.need_rows("FedAP")), common_training(cohort, bench, "FedAP")
        products = self.probe.steps * self.probe.probes * min(rows, self.probe.rows)
        return TRAINING_PASSES * (settings.epochs * rows + 2 * products)

    def _server(self, state: ServerState, cohort: Cohort, bench: Bench) -> Curvature:
        model, rows = state.single, bench.need_rows("FedAP")
        start = {name: model.posterior.mean[name] for name in model.spec.layout.trainable}
        trained = train_on(rows, state, common_training(cohort, bench, "FedAP"), bench)
        module = model.spec.build()
        module.load_state_dict(trained.params)
        with one_thread():
            return self.probe(module, start, rows, bench.stream("spectrum", state.round), bench.task)
