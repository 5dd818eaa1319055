"""Zhang and Zhang, Investigating Neuron Disturbing in Fusing Heterogeneous Neural Networks, 2022 (AMS).

Nothing is averaged: every client's network is kept, and an input x is answered by the k networks whose largest logit is
largest, argmax_c Σ_{m in top k} z_mc(x). Networks trained apart can have logits of different sizes; `LogitScale`
measures that on each client's rows, the options `calibrate` and `score` are other ways to compare them. `KeepAll` with
a rule of nets/mixture.py is the aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt

from fedfuse.client.class_sums import LabelCounts, Moments
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import Effort, Evidence, PlainEvidence
from fedfuse.core.state import Local
from fedfuse.errors import ConfigError
from fedfuse.nets.forward import AtLayer, Count, LayerChoice, Nearest
from fedfuse.nets.mixture import Calibration, Combine, Score, TopLogit, calibration
from fedfuse.server.aggregate.ensemble import CoverAnswers, CoverClasses, KeepAll, Shares
from fedfuse.server.steps.distill import InputSource, distillation
from fedfuse.server.steps.disturb import Disturbance


@dataclass(frozen=True, slots=True)
class LogitScale(PlainEvidence):
    """Shift and scale of the trained network's logits, found on the client's own rows (see `calibration`)."""

    kind: Calibration = "zscore"
    batch: int = 1000
    name: ClassVar[str] = "logit_scale"
    needs_classes: ClassVar[bool] = True
    reveals: ClassVar[str] = "how confident the client's network is on the client's rows, as two numbers"

    def __call__(self, local: Local) -> Params:
        """Two numbers."""
        with torch.no_grad():
            logits = torch.cat([local.predict(x).cpu() for x in local.rows.x.split(self.batch)])
        found = calibration(self.kind, logits, local.rows.y.cpu())
        return {f"{self.name}/{n}": torch.tensor(v, dtype=torch.float64) for n, v in found._asdict().items()}

    def passes(self, effort: Effort) -> float:  # noqa: ARG002 - the seam's signature
        """One pass forward."""
        return 1.0

    def expects(self, brief: Brief) -> Mapping[str, Form]:  # noqa: ARG002 - the seam's signature
        """Two numbers."""
        return {f"{self.name}/{n}": Form((), torch.float64) for n in ("shift", "scale")}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """A scale is above zero, and neither number is beyond what logits can be."""
        shift, scale = (float(notes[f"{self.name}/{n}"]) for n in ("shift", "scale"))
        if not 1e-6 <= scale <= 1e6:
            return Flaw(f"{self.name}/scale", scale, "a number from 1e-6 to 1e6")
        return None if abs(shift) <= 1e6 else Flaw(f"{self.name}/shift", shift, "a number from -1e6 to 1e6")


@method("ams", paper="arXiv:2210.12974", family="predictions")
def ams(
    k: PositiveInt | Literal["all"] = 1,
    layer: PositiveInt | Annotated[str, Field(min_length=1)] = "last",
    calibrate: Literal["none", "temperature", "zscore", "answers"] = "none",
    fitted: Literal["clients", "server"] = "clients",
    score: Score | Literal["mahalanobis"] = "logit",
    shares: Shares = "none",
    cover: Literal["none", "classes", "answers"] = "none",
    share: Annotated[float, Field(gt=0, le=1)] = 0.95,
    distill: InputSource = "none",
    inputs: PositiveInt = 2000,
    held_classes: bool = False,
    temperature: PositiveFloat = 1.0,
    epochs: PositiveInt = 100,
    lr: PositiveFloat = 1e-3,
    disturbance: bool = True,
) -> Recipe:
    """Keep every client's network; each input is answered by the networks most confident of it.

    A network's confidence is its largest logit. The k most confident ones answer by the sum of their logits: k = 1 is
    AMS-top1, k = "all" is AMS-full, where networks disturb each other. The networks may differ.

    Args:
        k: how many networks answer an input, or "all".
        layer: where they are chosen: at the "last", by their logits; or by the largest output of the "first", of a
            number from 1 on, or of a name, so that only the chosen ones run to the end.
        calibrate: make logits comparable: divide by a "temperature", standardize a network's confidence ("zscore"), or
            standardize each of its "answers" over the classes, which needs nobody's rows and makes nobody louder.
        fitted: where the calibration is found: by the "clients", each on its own rows, or on the "server" rows.
        score: of a network's confidence: its largest "logit", its "energy" log Σ exp z, the "margin" between its two
            largest logits, its largest "softmax" probability, or how near the input is to its own rows in its own
            features, by the "mahalanobis" distance, for which clients send the moments of their features.
        shares: add the log of a network's share of a class's rows to its logit for that class, by the label "counts"
            that clients send or as their output "biases" let guess.
        cover: leave out networks that others cover, by the "classes" of their rows or by their "answers".
        share: how much of everybody those kept must cover.
        distill: the inputs on which one network learns from all: "server" rows, "unlabelled" inputs, "impressions" or
            "generated" ones made of the networks themselves; "none" keeps all networks.
        inputs: how many "impressions" are made.
        held_classes: make "impressions" of a network only for the classes its client has rows of, by the label counts
            that clients then send.
        temperature: of distillation. Confidences of different networks are on different scales, and a high temperature
            teaches the scales.
        epochs: of distillation.
        lr: of distillation, by Adam.
        disturbance: measure how often adding logits changes the most confident network's answer.
    """
    scaled: Calibration | None = calibrate if calibrate in ("temperature", "zscore") else None
    evidence: tuple[Evidence, ...] = (LogitScale(scaled),) if scaled and fitted == "clients" else ()
    evidence += (LabelCounts(),) * (cover == "classes" or shares == "counts" or held_classes)
    evidence += (Moments(),) * (score == "mahalanobis")
    covers = {"none": None, "classes": CoverClasses(share), "answers": CoverAnswers(share)}
    return Recipe(
        evidence=evidence,
        aggregate=KeepAll(
            _rule(k, layer, score, calibrate == "answers"), "uniform", covers[cover], scaled, fitted, shares
        ),
        steps=(Disturbance(),) * disturbance + distillation(distill, inputs, temperature, epochs, lr, held_classes),
    )


def _rule(k: Count, layer: LayerChoice, score: Score | Literal["mahalanobis"], standardized: bool) -> Combine:
    """How members are chosen: at a layer, by distance, or by their logits."""
    if standardized and (layer != "last" or score == "mahalanobis"):
        raise ConfigError(
            "method 'ams': calibrate = 'answers' standardizes the logits by which networks are chosen, and here they "
            "are chosen otherwise; expected layer = 'last' and another score than 'mahalanobis' with it"
        )
    if layer != "last" and score != "logit":
        raise ConfigError(
            f"method 'ams': score {score!r} needs a network's last layer, and layer = {layer!r} chooses before it; "
            "expected layer = 'last' with it"
        )
    if layer != "last":
        return AtLayer(k, layer)
    return Nearest(k) if score == "mahalanobis" else TopLogit(k, score=score, standardized=standardized)
