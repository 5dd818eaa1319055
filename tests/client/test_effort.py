"""What objectives and evidence say they take of a network, against what torch counts while they work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedfuse.client.elbo import Elbo
from fedfuse.client.fisher import FisherDiagonal
from fedfuse.client.kfac import KroneckerFactors
from fedfuse.client.objectives import Contrastive, Proximal
from fedfuse.core.messages import Brief, ClientUpdate
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Effort, Evidence, HasPasses, Objective, TaskLoss, Work, passes_of
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local
from fedfuse.methods._pruning import CurvatureSpectrum
from fedfuse.methods.ams import LogitScale
from fedfuse.methods.fedov import OpenSet
from fedfuse.methods.prunefl import SquaredGradients
from fedfuse.methods.qfedavg import StartLoss
from fedfuse.methods.refit import UnitEvidence
from fedfuse.methods.scaffold import Controlled
from fedfuse.models.bayes import BayesianLayers
from fedfuse.nets.cost import cohort_flops, pass_flops

# The first layer is small: torch does not compute the gradient of the inputs, and we count it.
WIDE, ROWS = Spec("mlp", {"inputs": 4, "hidden": [160, 160], "classes": 40}), 32
SHAPE = (4,)


def local_at(spec: Spec, round_: int = 0, remembers: bool = False) -> Local:
    module = spec.build()
    params = {n: t.clone() for n, t in module.state_dict().items()}
    rows = Rows(torch.randn(ROWS, *SHAPE), torch.arange(ROWS) % 39)
    memory = {f"last/{n}": t + 0.1 for n, t in params.items()} if remembers else {}
    settings = LocalSettings(batch_size=8, kernel="torch")  # whose operations can be counted
    return Local("a", Brief(round_, spec, params, classes=39), rows, settings, module, memory, 0)


class Counter(TorchDispatchMode):
    """Torch's own count, by its table; its own counter cannot look on while gradients of inputs are taken."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if rule := flop_registry.get(func._overloadpacket):
            self.total += rule(*args, **(kwargs or {}), out_val=out)
        return out


def counted(work: Callable[[], object]) -> float:
    with Counter() as counter:
        work()
    return counter.total


def train_once(objective: Objective, local: Local) -> None:
    loss = objective(local, (local.rows.x, local.rows.y))
    torch.autograd.grad(loss, list(local.live.values()), materialize_grads=True)


@pytest.mark.parametrize(
    ("objective", "round_"),
    [
        (TaskLoss(), 0),
        (Proximal(0.1), 0),
        (Controlled(Proximal(0.1)), 0),
        (OpenSet(steps=5), 0),
        (OpenSet(steps=1), 0),
        (Proximal(0.1, base=OpenSet(steps=2)), 0),
        (Contrastive(1.0), 0),
        (Contrastive(1.0), 3),
        (Contrastive(1.0, base=Proximal(0.1)), 3),
    ],
    ids=repr,
)
def test_an_objective_takes_what_it_says(objective: Objective, round_: int) -> None:
    local = local_at(WIDE, round_, remembers=round_ > 0)
    effort = Effort(WIDE, SHAPE, round_, ROWS, local.settings)
    said = ROWS * passes_of(objective, effort) * pass_flops(WIDE, SHAPE, training=True)
    assert counted(lambda: train_once(objective, local)) == pytest.approx(said, rel=0.06)


def test_bayesian_layers_compute_mean_and_variance() -> None:
    spec = BayesianLayers(last=2)(Single.of(WIDE.build(), WIDE), 40, 0).spec
    local = local_at(spec)
    said = ROWS * passes_of(Elbo(), Effort(spec, SHAPE, 0, ROWS, local.settings))
    plain, bayesian = (said * pass_flops(spec, SHAPE, training=training) for training in (False, True))
    assert counted(lambda: train_once(Elbo(), local)) == pytest.approx(bayesian, rel=0.05)
    assert bayesian > 1.9 * plain


@pytest.mark.parametrize(
    ("evidence", "round_", "within"),
    [
        (KroneckerFactors(), 0, 0.1),
        (FisherDiagonal(), 0, 0.05),
        (StartLoss(), 0, 0.01),
        (LogitScale("temperature"), 0, 0.01),
        (SquaredGradients(every=2, batches=2), 1, 0.05),
        (SquaredGradients(every=2, batches=2), 2, 0.0),
        (CurvatureSpectrum(), 0, 0.35),
        (CurvatureSpectrum(), 1, 0.0),
        (UnitEvidence("mean", 0), 0, 0.01),
        (UnitEvidence("mean", 0), 1, 0.0),
    ],
    ids=repr,
)
def test_evidence_takes_what_it_says(evidence: Evidence, round_: int, within: float) -> None:
    local = local_at(WIDE, round_)
    local.module.eval()
    assert isinstance(evidence, HasPasses)
    said = ROWS * evidence.passes(Effort(WIDE, SHAPE, round_, ROWS, local.settings)) * pass_flops(WIDE, SHAPE)
    assert counted(lambda: evidence(local)) == pytest.approx(said, rel=within)


def test_a_round_adds_training_and_evidence() -> None:
    update = ClientUpdate("a", Posterior({}), num_examples=16.0, steps=4, spec=WIDE)
    settings, one = LocalSettings(epochs=2, batch_size=8), pass_flops(WIDE, SHAPE)
    plain = cohort_flops([update], Work(settings), SHAPE)
    open_set = cohort_flops([update], Work(settings, OpenSet(steps=5), evidence=(StartLoss(),)), SHAPE)
    assert plain == (2 * 16 * 3 * one, 0, 0)
    passes = passes_of(OpenSet(steps=5), Effort(WIDE, SHAPE, 0, 16, settings))
    assert passes > 19  # three batches of three passes, five steps of two
    assert open_set == (int(2 * 16 * passes * one), 0, 16 * one)
    looking = cohort_flops([update], Work(settings, evidence=(FisherDiagonal(), StartLoss())), SHAPE)
    assert looking == (2 * 16 * 3 * one, 3 * 16 * one, 16 * one)  # a Fisher is curvature, a loss is not
