"""Zhang and Zhang, Investigating Neuron Disturbing in Fusing Heterogeneous Neural Networks, 2022."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from fedfuse.client.evidence.calibration import LogitScale
from fedfuse.client.evidence.counts import LabelCounts
from fedfuse.client.evidence.moments import Moments
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import Evidence
from fedfuse.errors import ConfigError
from fedfuse.nets.calibrate import Calibration
from fedfuse.nets.combine import Combine, Score, TopLogit
from fedfuse.nets.routes import AtLayer, Count, LayerChoice, Nearest
from fedfuse.server.aggregate.cover import CoverAnswers, CoverClasses
from fedfuse.server.aggregate.ensemble import KeepAll, Shares
from fedfuse.server.steps.distill import InputSource, distillation
from fedfuse.server.steps.disturb import Disturbance


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
