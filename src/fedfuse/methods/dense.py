"""Zhang et al., DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.settings import Optimizer
from fedfuse.nets.mixture import MeanLogit
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.steps.distill import Distill
from fedfuse.server.steps.synthesize import Generate


@method("dense", paper="arXiv:2112.12371", family="predictions")
def dense(
    epochs: PositiveInt = 200,
    steps: PositiveInt = 30,
    batch: PositiveInt = 256,
    latent: PositiveInt = 256,
    width: PositiveInt = 64,
    generator_lr: PositiveFloat = 1e-3,
    oh: NonNegativeFloat = 1.0,
    bn: NonNegativeFloat = 1.0,
    adv: NonNegativeFloat = 1.0,
    temperature: PositiveFloat = 20.0,
    lr: PositiveFloat = 0.005,
    momentum: NonNegativeFloat = 0.9,
) -> Recipe:
    """Distil the mean of all networks' logits into one network, on images that a generator makes of the networks.

    Every epoch a fresh generator is trained, its best batch joins a pool, and the student passes over the pool once.
    The student of the last epoch is the result. The clients' networks may differ; the student has the experiment's.
    The published sizes take hours on a core, nearly all of it the generator's, and a run says so before it trains;
    a generator half as wide takes about a quarter, and the price grows with epochs × steps × batch.

    Args:
        epochs: batches of images, and passes over the pool.
        steps: Adam's steps that train the generator, per epoch.
        batch: images per epoch, and per step of the student.
        latent: length of the generator's input.
        width: half the generator's feature maps.
        generator_lr: the generator's rate.
        oh: weight of the cross entropy between the teacher's answer and random labels.
        bn: weight of the distance to the statistics in the networks' batch norms; without batch norms it is zero.
        adv: weight of the student's error where it differs from the teacher.
        temperature: of distillation.
        lr: the student's rate, by SGD.
        momentum: of the student's SGD.
    """
    input_source = Generate(batch, latent, steps, generator_lr, oh, bn, adv, width)
    optimizer = Optimizer(name="sgd", lr=lr, momentum=momentum)
    return Recipe(aggregate=KeepAll(MeanLogit()), steps=(Distill(input_source, temperature, epochs, batch, optimizer),))
