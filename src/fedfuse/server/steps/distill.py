"""The way back from several networks to one: a student learns to answer as they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.messages import Cohort, Start
from fedfuse.core.model import Answering
from fedfuse.core.rng import seeded
from fedfuse.core.seams import TRAINING_PASSES, Result, ServerPart, ServerStep
from fedfuse.core.settings import Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of
from fedfuse.core.torch_utils import answer_in_full
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.cost import MASK, count_server_work
from fedfuse.nets.head import with_outputs
from fedfuse.server.aggregate.ensemble import inference_costs
from fedfuse.server.aggregate.mean import mean_of
from fedfuse.server.inputs import common_form
from fedfuse.server.steps.synthesize import (
    DistillationInputs,
    Generate,
    Impressions,
    ServerInputs,
    Teacher,
    UnlabelledInputs,
    count_outputs,
)
from fedfuse.training.optimizers import stepper

InputSource: TypeAlias = Literal["none", "server", "unlabelled", "impressions", "generated"]
INPUT_SOURCES: dict[str, DistillationInputs] = {
    "server": ServerInputs(),
    "unlabelled": UnlabelledInputs(),
    "impressions": Impressions(),
    "generated": Generate(batch=128, steps=20, width=32),  # an eighth of what DENSE spends on an image
}


@dataclass(frozen=True, slots=True)
class Distill(ServerPart):
    """Train one network to answer as the fused model does, by KL divergence at a temperature.

    The student has the network that clients begin with, so after this step rounds can go on from it. Inputs come from
    `input_source`, before each epoch more of them if it makes any; labels are never looked at.

    Attributes:
        input_source: where inputs come from.
        temperature: T of `kl_at`.
        epochs: passes over the pool.
        batch: inputs per step.
        optimizer: the student's.
        begin: "fresh" starts from new random weights, "mean" from the clients' average, where they have this network.
    """

    input_source: DistillationInputs
    temperature: float = 20.0
    epochs: int = 100
    batch: int = 64
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(name="adam", lr=1e-3))
    begin: Literal["fresh", "mean"] = "fresh"
    result: ClassVar[Result] = "single"
    needs_classes: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """What its source of inputs needs."""
        return self.input_source.needs | {"network"}

    @property
    def needs_numbers(self) -> bool:
        """Where inputs are made rather than given."""
        return self.input_source.needs_numbers

    def passes(self, clients: int, bench: Bench) -> float:
        """Those that make the inputs, and those that the student learns from."""
        return sum(self.input_source.workload(self.epochs, clients, bench))

    def seconds(self, bench: Bench) -> float:
        """Those of making the inputs, without the networks' answers."""
        return self.input_source.seconds(self.epochs, bench)

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """The state with the student in the place of its teachers."""
        if not isinstance(state.model, Answering):
            raise RecipeError("networks that stay apart have no common answer to learn; let them answer together first")
        teacher, device = state.model.to(bench.local.device), bench.local.device
        with seeded(bench.seed, "distil", state.round):
            start = self._start(state, cohort, teacher, bench)
            student = start.spec.build()
            student.load_state_dict(dict(start.params))
            learner = _Learner.of(student.to(device), start.spec, state)
            facts = self._train(learner, teacher, bench, state.round)
        mean = {n: t.detach().cpu() for n, t in student.state_dict().items()}
        fused = count_server_work(
            state.fused(mean, spec=start.spec), TRAINING_PASSES * self.passes(len(cohort), bench), bench
        )
        return fused.noting(distilled=facts, **inference_costs(fused.single, [u.spec for u in cohort], bench))

    def _start(self, state: ServerState, cohort: Cohort, teacher: Teacher, bench: Bench) -> Start:
        """The student before it is trained: its network, its first weights, and as many outputs as the teacher."""
        spec = state.start.spec
        alike = [u for u in cohort if u.spec == spec]
        fresh = self.begin == "fresh" or not alike
        params = spec.build().state_dict() if fresh else mean_of(Cohort(tuple(alike)))
        form = common_form(bench, [spec, *(m.spec for m in teacher.members)])
        return with_outputs(Start(spec, params), count_outputs(teacher, form), bench.seed)

    def _train(self, learner: _Learner, teacher: Teacher, bench: Bench, round_: int) -> dict[str, float]:
        student, params, step, pool = learner.module, list(learner.params.values()), stepper(self.optimizer), _Pool()
        loss = torch.zeros(())
        for epoch in range(self.epochs):
            student.eval().requires_grad_(False)  # inputs are made for it as it is: only the loop below trains it
            pool.add(self.input_source(epoch, teacher, student, bench), teacher, bench.local.device)
            student.train()
            for param in params:  # and no others: parameters that the author froze stay frozen
                param.requires_grad_(True)
            total, count = torch.zeros(()), 0
            for x, z in self._views(pool, teacher, bench, round_, epoch):
                loss = kl_at(self.temperature, answer_in_full(student, x), z)
                slopes = list(torch.autograd.grad(loss, params, materialize_grads=True))
                with torch.no_grad():
                    step(params, slopes, self.optimizer.lr)
                    learner.apply_masks()
                total, count = total + loss.detach().cpu(), count + 1
            loss = total / max(count, 1)
            bench.progress("distilling, epoch", epoch + 1, self.epochs)
        student.eval()
        return {"inputs": len(pool.x), "loss": float(loss), "agreement": pool.agreement(student)}

    def _views(
        self, pool: _Pool, teacher: Teacher, bench: Bench, round_: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The pool's batches, augmented as the clients' rows were; the teacher is then asked again."""
        draw, change = bench.stream("distil", round_, epoch), bench.local.augment
        for x, z in pool.batches(self.batch, draw):
            if change is not None:
                x = change(x, draw)
                with torch.no_grad():
                    z = teacher.logits(x)
            yield x, z


@dataclass(frozen=True, slots=True)
class _Learner:
    """A student, those of its parameters that train, and the masks that hold some of them at zero."""

    module: nn.Module
    params: dict[str, Tensor]
    masks: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module, spec: Spec, state: ServerState) -> _Learner:
        """The student of a state."""
        own = dict(module.named_parameters())
        params: dict[str, Tensor] = {name: own[name] for name in spec.layout.trainable}
        return cls(module, params, {n: m for n, m in entries_of(state.memory, MASK).items() if n in params})

    def apply_masks(self) -> None:
        """Set the weights that a mask leaves out to zero."""
        for name, mask in self.masks.items():
            self.params[name].mul_(mask.to(self.params[name]))


@dataclass(slots=True)
class _Pool:
    """Inputs with the teacher's answers, asked once."""

    x: Tensor = field(default_factory=lambda: torch.empty(0))
    z: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, x: Tensor, teacher: Teacher, device: str) -> None:
        """Put inputs into the pool."""
        if not len(x):
            return
        x = x.to(device)
        with torch.no_grad():
            z = torch.cat([teacher.logits(part) for part in x.split(1000)])
        self.x, self.z = (torch.cat([self.x, x]), torch.cat([self.z, z])) if len(self.x) else (x, z)

    def batches(self, size: int, draw: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """The pool in a new order; a last batch of one input is left out, for batch norms cannot learn from it."""
        order = torch.randperm(len(self.x), generator=draw).to(self.x.device)
        for index in order.split(size):
            if len(index) > 1 or len(order) == 1:
                yield self.x[index], self.z[index]

    def agreement(self, student: nn.Module) -> float:
        """How often a student's answer is the teacher's."""
        with torch.no_grad():
            guess = torch.cat([answer_in_full(student, part).argmax(-1) for part in self.x.split(1000)])
        return float((guess == self.z.argmax(-1)).double().mean())


def kl_at(temperature: float, student: Tensor, teacher: Tensor) -> Tensor:
    """T² · mean over the batch of KL(softmax(z_teacher/T) ‖ softmax(z_student/T)).

    Example:
        >>> kl_at(2.0, torch.zeros(1, 2), torch.tensor([[0.0, 2.0]]))
        tensor(0.4438)
    """
    mine, theirs = ((z / temperature).log_softmax(-1) for z in (student, teacher))
    return F.kl_div(mine, theirs, reduction="batchmean", log_target=True) * temperature**2


def distillation(
    source: InputSource, inputs: int, temperature: float, epochs: int, lr: float, held: bool = False
) -> tuple[ServerStep, ...]:
    """The step a method's options ask for: none, or distillation by Adam on inputs from a source.

    Example:
        >>> [type(step.input_source).__name__ for step in distillation("unlabelled", 500, 4.0, 10, 1e-3)]
        ['UnlabelledInputs']
    """
    if held and source != "impressions":
        raise ConfigError(
            f"held_classes is about impressions, and distill is {source!r}; expected distill = 'impressions' with it"
        )
    if source == "none":
        return ()
    input_source, optimizer = INPUT_SOURCES[source], Optimizer(name="adam", lr=lr)
    if isinstance(input_source, Impressions):
        input_source = replace(input_source, count=inputs, held=held)
    return (Distill(input_source, temperature, epochs, optimizer=optimizer),)
