"""Wu et al., Grid Binary LOgistic REgression (GLORE), JAMIA 2012: a pooled fit from sums, with its inference.

A generalized linear model, or the last linear layer of a network, is fitted by Newton's method. The sums below are
those of the pooled rows, so the fit is the pooled one whatever the partition. One exchange is

    client   ℓ_k, g_k and H_k: loss, gradient and Hessian over its rows at w             `CurvatureSums`
    server   w ← w − (Σ H_k + ρ)⁻¹ (Σ g_k + ρ w)                                         `NewtonStep`

The server also reports coefficients with standard errors from (Σ H_k)⁻¹ (`coefficient_table`), and whether the sites
agree, by Cochran's Q (`heterogeneity`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from fedfuse.core.messages import Brief, Cohort, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import CurvatureEvidence, Effort, ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState, representation
from fedfuse.linalg.psd import is_psd, packed_size
from fedfuse.nets.glm import (
    WEIGHTS,
    Family,
    NewtonSums,
    family_of,
    fit_glm,
    hessian_in,
    layer_matrix,
    newton_direction,
    newton_sums,
    penalized_loss,
    penalties,
    solve_symmetric,
    sum_notes,
    sums_in,
    with_layer,
)
from fedfuse.nets.head import linear_layer

First = Literal["sums", "local"]


@dataclass(frozen=True, slots=True)
class CurvatureSums(CurvatureEvidence):
    """Loss, gradient and Hessian of the last linear layer over the client's rows, in float64.

    They are taken at the weights the server publishes in float64, or at the network's own. With first = "local" the
    first round brings the client's own fit instead and the Hessian there.

    Attributes:
        family: "auto" takes the task's, "poisson" counts.
        first: what the first round brings.
        ridge: the penalty of the client's own fit.
    """

    family: Literal["auto", "poisson"] = "auto"
    first: First = "sums"
    ridge: float = 0.0
    name: ClassVar[str] = "newton"
    needs_one_target: ClassVar[bool] = True
    reveals: ClassVar[str] = (
        "the gradient and the Hessian of the last layer, summed over the client's rows: second moments of the features "
        "its layer reads"
    )

    def __call__(self, local: Local) -> Params:
        """One pass over the rows; a local fit takes a few over the features."""
        brief, family = local.brief, family_of(local.task, self.family)
        weights = layer_matrix(brief.spec, brief.params, brief.memory)
        features = layer_features(local, weights.shape[1])
        y = local.rows.y.cpu()
        if self.first == "local" and brief.round == 0:
            ridge, free = penalties(weights, self.ridge, family)
            weights, sums = fit_glm(features, y, family, ridge, free)
            return sum_notes(sums, len(y)) | {"newton/fit": weights}
        return sum_notes(newton_sums(features, y, weights, family), len(y))

    def passes(self, effort: Effort) -> float:  # noqa: ARG002 - the seam's signature
        """One pass forward; the sums over the last layer's features are left out."""
        return 1.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A number, a table and a triangle; a local fit is one more table."""
        rows, columns = layer_matrix(brief.spec, brief.params, brief.memory).shape
        shape, size = (rows, columns), rows * columns
        wanted = {
            "newton/count": Form((), torch.float64),
            "newton/loss": Form((), torch.float64),
            "newton/gradient": Form(shape, torch.float64),
            "newton/hessian": Form((packed_size(size),), torch.float64),
        }
        brings_fit = self.first == "local" and brief.round == 0
        return wanted | ({"newton/fit": Form(shape, torch.float64)} if brings_fit else {})

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """A Hessian of real rows has no negative eigenvalue, a loss is not negative, and rows are as many as said."""
        if float(notes["newton/count"]) != num_examples:
            return Flaw("newton/count", float(notes["newton/count"]), f"the num_examples {num_examples:g}")
        if self.family != "poisson" and (loss := float(notes["newton/loss"])) < 0:
            return Flaw("newton/loss", loss, "a sum of losses ≥ 0")
        if not is_psd(hessian_in(notes)):
            return Flaw("newton/hessian", "not positive semi-definite", "a matrix without negative eigenvalues")
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The length of the gradient, the mean eigenvalue of the Hessian and the loss per row; the length of a fit."""
        rows, gradient = max(float(notes["newton/count"]), 1.0), notes["newton/gradient"]
        told = {
            "newton/gradient": float(gradient.norm()) / rows,
            "newton/hessian": float(hessian_in(notes).trace()) / (gradient.numel() * rows),
            "newton/loss": abs(float(notes["newton/loss"])) / rows,
        }
        return told | ({"newton/fit": float(notes["newton/fit"].norm())} if "newton/fit" in notes else {})


def layer_features(local: Local, width: int) -> Tensor:
    """What the last linear layer reads, a 1 appended where it has a bias, float64."""
    with torch.no_grad():
        parts = [representation(local.module, x)[1].double().cpu() for x in local.rows.x.split(512)]
    phi = torch.cat(parts)
    return phi if phi.shape[1] == width else torch.cat([phi, phi.new_ones(len(phi), 1)], 1)


_FALLEN = 1e-3  # of the information in some direction since the first exchange: classes are then told apart completely


@dataclass(frozen=True, slots=True)
class NewtonStep(ServerPart):
    """w ← w − (ΣH_k + ρ)⁻¹ (Σg_k + ρw); a step that raised the summed loss is halved instead.

    The weights are kept in float64 in the server's memory and published, so that steps converge beyond the network's
    own precision. Where clients bring fits of their own, w = (ΣH_k)⁻¹ ΣH_k w_k, the inverse-variance estimate.

    Attributes:
        ridge: ρ, of all weights but the constant's; 0 leaves estimates unpenalized, as inference needs.
        family: "auto" takes the task's, "poisson" counts.
    """

    ridge: float = 0.0
    family: Literal["auto", "poisson"] = "auto"
    needs: ClassVar[frozenset[str]] = frozenset({"newton", "start"})
    laws: ClassVar[frozenset[str]] = frozenset({"order", "pure", "dtype", "finite", "repeat"})

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """There must be a linear layer at the end, and the family must suit the task."""
        family_of(bench.task, self.family)
        for spec in networks.values():
            linear_layer(spec.layout)

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """One step, and what can be told of the fit so far."""
        spec, params, family = state.single.spec, state.single.posterior.mean, family_of(bench.task, self.family)
        weights = layer_matrix(spec, params, state.memory)
        each = [sums_in({n: t.clone() for n, t in u.notes.items()}) for u in cohort]
        total = sum(each[1:], each[0])
        ridge, free = penalties(weights, self.ridge, family, linear_layer(spec.layout).bias is not None)
        fits = [u.notes["newton/fit"].clone() for u in cohort if "newton/fit" in u.notes]
        if fits:
            moved = _inverse_variance(each, fits, free)
            memory: dict[str, Tensor] = {WEIGHTS: moved}
            facts: dict[str, Any] = {"exchange": "local fits"}
            moves = [fit - moved for fit in fits]
        else:
            moved, memory, facts = self._step(total, weights, ridge, free, state.memory)
            moves = one_step_moves(each, free)
        count = sum(float(u.notes["newton/count"]) for u in cohort)  # not num_examples, which the door may have clipped
        facts |= {"heterogeneity": heterogeneity(each, moves, free)}
        facts |= _separation(total, free, state.memory, memory, family)
        facts["coefficients"] = coefficient_table(moved, total, free, family, count, bench.features)
        after = state.fused(with_layer(spec, params, moved))
        kept = {n: t for n, t in state.memory.items() if not n.startswith("newton/")}
        return replace(after, memory={**kept, **memory}).noting(newton=facts)

    def _step(
        self, sums: NewtonSums, weights: Tensor, ridge: Tensor, free: Tensor, before: Params
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        """The next weights, what to remember, and what to tell."""
        loss = penalized_loss(sums.loss, weights, ridge)
        gradient = float((sums.gradient + ridge * weights)[free].abs().max())
        facts: dict[str, Any] = {"loss": loss, "gradient": gradient}
        last = before.get("newton/loss")
        if last is not None and loss > float(last) + 1e-12 * abs(float(last)):
            step, origin = before["newton/step"] / 2, before["newton/origin"].clone()
            kept, halved = last.clone(), True
        else:
            step, origin = newton_direction(sums, weights, ridge, free), weights
            kept, halved = torch.tensor(loss, dtype=torch.float64), False
        moved = origin + step
        memory = {WEIGHTS: moved, "newton/origin": origin, "newton/step": step, "newton/loss": kept}
        return moved, memory, facts | {"step": float(step.abs().max()), "halved": halved}


def _inverse_variance(each: Sequence[NewtonSums], fits: Sequence[Tensor], free: Tensor) -> Tensor:
    """(ΣH_k)⁻¹ ΣH_k w_k, over the free weights."""
    hessians = [_free(s.hessian, free) for s in each]
    right = [h @ w.flatten()[free.flatten()] for h, w in zip(hessians, fits, strict=True)]
    found = torch.zeros(free.numel(), dtype=torch.float64)
    found[free.flatten()] = solve_symmetric(sum(hessians[1:], hessians[0]), sum(right[1:], right[0]))
    return found.view_as(free)


def _separation(
    sums: NewtonSums, free: Tensor, before: Params, memory: dict[str, Tensor], family: Family
) -> dict[str, Any]:
    """Whether classes are told apart completely, so that a coefficient runs away and has no finite estimate."""
    least = torch.linalg.eigvalsh(_free(sums.hessian, free))[0].clamp(min=0)
    first = before.get("newton/information", least)
    memory["newton/information"] = first.clone()
    apart = family in ("bernoulli", "multinomial") and float(first) > 0 and float(least) < _FALLEN * float(first)
    return {"separation": bool(apart)}


def coefficient_table(
    weights: Tensor, sums: NewtonSums, free: Tensor, family: Family, num_examples: float, names: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Each free coefficient with its standard error, test and 95 % interval.

    The covariance is the inverse of the Hessian at the fit; for numbers times the residual variance RSS/(n − p), with
    Student's t in place of the normal.

    Args:
        weights: outputs × features.
        sums: of all rows, at the weights.
        free: which coefficients were estimated.
        family: of the likelihood.
        num_examples: n.
        names: of the features, the constant aside.
    """
    covariance = torch.linalg.pinv(_free(sums.hessian, free), hermitian=True)
    freedom = num_examples - covariance.shape[0]
    if family == "gaussian":
        covariance = covariance * (2 * float(sums.loss) / max(freedom, 1.0) / len(weights))
    from scipy import stats  # late: it takes as long to load as a small fusion lasts

    spread = stats.t(max(freedom, 1.0)) if family == "gaussian" else stats.norm()
    errors = covariance.diagonal().clamp(min=0).sqrt().tolist()
    width, (outputs, inputs) = float(spread.ppf(0.975)), weights.shape
    labels = [*names, "constant"] if len(names) == inputs - 1 else list(names)
    if len(labels) != inputs:
        labels = [*(f"x{feature}" for feature in range(inputs - 1)), "constant"]
    table = []
    for (output, feature), se in zip(free.nonzero().tolist(), errors, strict=True):
        b = float(weights[output, feature])
        low, high = b - width * se, b + width * se
        line: dict[str, Any] = {
            "name": labels[feature] if outputs == 1 else f"{output}: {labels[feature]}",
            "estimate": b,
            "standard_error": se,
            "p": 2 * float(spread.sf(abs(b) / se)) if se > 0 else math.nan,
            "low": low,
            "high": high,
        }
        if family != "gaussian":  # a coefficient of a logarithm multiplies odds or rates; e^709 is the largest float64
            ratio, least, most = (math.exp(min(v, 700.0)) for v in (b, low, high))
            kind = "rate_ratio" if family == "poisson" else "odds_ratio"
            line |= {kind: ratio, "ratio_low": least, "ratio_high": most}
        table.append(line)
    return table


def heterogeneity(each: Sequence[NewtonSums], moves: Sequence[Tensor], free: Tensor) -> dict[str, float]:
    """Cochran's Q = Σ_k d_kᵀ H_k d_k with d_k = w_k − w, its degrees of freedom, p-value and I² = max(0, (Q − df)/Q).

    Args:
        each: every site's sums.
        moves: how far each site's own fit is from the common one, outputs × features.
        free: which coefficients were estimated.
    """
    hessians = [_free(s.hessian, free) for s in each]
    ranks = [int(torch.linalg.matrix_rank(h, hermitian=True)) for h in hessians]
    away = [d.flatten()[free.flatten()] for d in moves]
    q = sum(float(d @ h @ d) for d, h in zip(away, hessians, strict=True))
    freedom = max(sum(ranks) - int(free.sum()), 0)
    from scipy import stats

    chance = float(stats.chi2.sf(q, freedom)) if freedom else math.nan
    return {"Q": q, "df": freedom, "p": chance, "I2": max(0.0, (q - freedom) / q) if q > 0 else 0.0}


def one_step_moves(each: Sequence[NewtonSums], free: Tensor) -> list[Tensor]:
    """Where a Newton step alone would take each site from the common fit: the score form of its own fit."""
    chosen = free.flatten()
    moves = []
    for sums in each:
        step = torch.zeros(free.numel(), dtype=sums.hessian.dtype)
        step[chosen] = -solve_symmetric(_free(sums.hessian, free), sums.gradient.flatten()[chosen])
        moves.append(step.view_as(free))
    return moves


def _free(hessian: Tensor, free: Tensor) -> Tensor:
    chosen = free.flatten()
    return hessian[chosen][:, chosen]


@method("newton", paper="doi:10.1136/amiajnl-2012-000862", family="statistics")
def newton(
    ridge: NonNegativeFloat = 0.0,
    family: Literal["auto", "poisson"] = "auto",
    first: First = "sums",
) -> Recipe:
    """Exact Newton steps of a generalized linear model, or of a network's last layer: the pooled fit in a few rounds.

    Clients do not train; they send loss, gradient and Hessian of the last linear layer at the common weights. The sums
    are those of the pooled rows, so rounds converge to the pooled optimum, whatever the partition. Beside the model are
    coefficients with standard errors, intervals, p-values and odds ratios, and the sites' heterogeneity (Q, I²).

    Args:
        ridge: the penalty ρ of ½ρ‖w‖², constants aside; 0 for inference, where the first class is the reference.
        family: "auto" is logistic, multinomial or linear as the task says; "poisson" models counts (regression), and
            the network's output is then the logarithm of the rate.
        first: "local" lets the first exchange bring each client's own fit: the inverse-variance estimate.
    """
    return Recipe(
        trains=False,
        evidence=(CurvatureSums(family, first, ridge),),
        aggregate=NewtonStep(ridge, family),
        publishes=("newton",),
    )
