"""Inputs for distillation: the server's own rows, or inputs made of networks alone (data impressions, DENSE)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.inputs import InputForm, reads_tokens
from fedfuse.core.model import Answering, Single
from fedfuse.core.rng import seeded
from fedfuse.core.settings import Optimizer
from fedfuse.core.state import Bench
from fedfuse.core.torch_utils import answer_in_full, forward_hooks
from fedfuse.errors import ConfigError
from fedfuse.nets.mixture import Mixture
from fedfuse.server.inputs import synthetic_form
from fedfuse.training.optimizers import stepper

Teacher: TypeAlias = Answering
_NORMS = nn.modules.batchnorm._BatchNorm


class DistillationInputs(Protocol):
    """Where a student's inputs come from; their answers come from the teacher."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    @property
    def needs_numbers(self) -> bool:
        """Whether inputs are made by following a slope, which tokens have not."""
        ...

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:
        """The inputs that join the pool before an epoch; there may be none."""
        ...

    def workload(self, epochs: int, members: int, bench: Bench) -> tuple[float, float]:
        """About how many examples pass a network to make the inputs, and how many pass the student in all epochs."""
        ...

    def seconds(self, epochs: int, bench: Bench) -> float:
        """About how long making the inputs takes besides, by a short trial on this machine."""
        ...


class _HeldInputs(ABC):
    """Inputs that the server holds: all of them join the pool before the first epoch."""

    __slots__ = ()
    needs_numbers: ClassVar[bool] = False

    @abstractmethod
    def held(self, bench: Bench) -> Tensor:
        """The inputs."""

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:  # noqa: ARG002
        """All of them, before the first epoch."""
        x = self.held(bench)
        return x if epoch == 0 else x[:0]

    def workload(self, epochs: int, members: int, bench: Bench) -> tuple[float, float]:  # noqa: ARG002
        """Nothing is made; the student sees all of them in every epoch."""
        return 0.0, float(epochs * len(self.held(bench)))

    def seconds(self, epochs: int, bench: Bench) -> float:  # noqa: ARG002
        """None: they are there."""
        return 0.0


@dataclass(frozen=True, slots=True)
class ServerInputs(_HeldInputs):
    """The inputs of the server's own rows; their labels are not looked at."""

    needs: ClassVar[frozenset[str]] = frozenset({"server_rows"})

    def held(self, bench: Bench) -> Tensor:
        """The rows' inputs."""
        return bench.need_rows("distillation").x


@dataclass(frozen=True, slots=True)
class UnlabelledInputs(_HeldInputs):
    """Inputs without labels that the server holds."""

    needs: ClassVar[frozenset[str]] = frozenset({"unlabelled"})

    def held(self, bench: Bench) -> Tensor:
        """The inputs without labels."""
        return bench.need_unlabelled("distillation")


def server_inputs(
    bench: Bench, count: int, *purpose: str | int
) -> tuple[Tensor, Literal["server", "unlabelled"]] | None:
    """Up to `count` inputs that the server holds, drawn at random, and where they are from; None if it has none."""
    if bench.rows is not None and len(bench.rows):
        return _sample(bench.rows.x, count, bench.stream(*purpose)), "server"
    if bench.unlabelled is not None and len(bench.unlabelled):
        return _sample(bench.unlabelled, count, bench.stream(*purpose)), "unlabelled"
    return None


def _sample(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return x if len(x) <= count else x[torch.randperm(len(x), generator=generator)[:count]]


@dataclass(frozen=True, slots=True)
class Impressions:
    """Data impressions of a network, for distillation without any data (Nayak et al., ICML 2019).

    For each input a class is drawn, then an answer y ~ Dirichlet(β · s_c) where s_c holds the class's similarities to
    all classes (`class_similarity`), and noise is moved by Adam until a network gives that answer:
    x = argmin −Σ_c y_c log softmax(z(x)/T)_c. Half of the inputs are made with each β. Numbers stay in the inputs'
    range because they are the sigmoid of what is moved.

    Of several networks each makes its share of the inputs, for only it knows what its classes look like. Where they
    answer together, far from all data the largest logits decide alone, and the others' classes never appear:
    ten clients of two classes each gave impressions of two classes.

    Attributes:
        count: how many inputs are made.
        of: whose answers are sought: those of the single "members", in turn, or of the "teacher" they are together.
        steps: Adam's steps.
        lr: Adam's rate.
        temperature: T.
        beta: how far an answer may be from its class; small values give extreme answers.
        batch: inputs made at a time.
        held: make inputs of a member only for classes its client has rows of, which label counts tell; of other classes
            it knows nothing but that they are not its own.
    """

    count: int = 2000
    of: Literal["members", "teacher"] = "members"
    steps: int = 100
    lr: float = 0.05
    temperature: float = 20.0
    beta: tuple[float, ...] = (1.0, 0.1)
    batch: int = 500
    held: bool = False
    needs_numbers: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Label counts, where they decide what is made."""
        return frozenset({"counts"} if self.held else ())

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module | None, bench: Bench) -> Tensor:  # noqa: ARG002
        """All of them, before the first epoch."""
        form = synthetic_form(bench, [m.spec for m in teacher.members])
        if epoch > 0:
            return torch.empty(0, *form.shape)
        draw, classes = bench.stream("impressions"), count_outputs(teacher, form)
        asked = teacher.members if self.of == "members" else (teacher,)
        parts = torch.arange(self.count).tensor_split(len(asked))
        batches = []
        for one, indices, held in zip(asked, parts, self._classes_to_make(teacher, len(asked)), strict=True):
            answers = wanted_answers(class_similarity(one.members, classes), indices, self.beta, draw, held)
            for y in answers.to(bench.local.device).split(self.batch):
                batches.append(self._make_impressions(one, form, y, draw))
                bench.progress("impressions, input", sum(map(len, batches)), self.count)
        return torch.cat(batches)

    def _classes_to_make(self, teacher: Teacher, asked: int) -> Sequence[Sequence[int]]:
        """The classes each of those asked makes inputs for; nothing stands for all."""
        if not self.held:
            return ((),) * asked
        if self.of != "members" or not isinstance(teacher, Mixture) or len(teacher.held) != asked:
            raise ConfigError(
                "inputs were to be made for the classes each network's client has rows of, and the networks do not "
                "come one by one with label counts; keep all networks and let clients send counts, or make all classes"
            )
        return teacher.held

    def workload(self, epochs: int, members: int, bench: Bench) -> tuple[float, float]:  # noqa: ARG002
        """Every input takes its steps through its own network, or through all; the student sees all in every epoch."""
        networks = 1 if self.of == "members" else members
        return float(self.count * self.steps * networks), float(epochs * self.count)

    def seconds(self, epochs: int, bench: Bench) -> float:  # noqa: ARG002
        """None to speak of: numbers are moved by themselves."""
        return 0.0

    def _make_impressions(self, teacher: Teacher, form: InputForm, answers: Tensor, draw: torch.Generator) -> Tensor:
        free = torch.randn(len(answers), *form.shape, generator=draw).to(answers.device).requires_grad_()
        step = stepper(Optimizer(name="adam", lr=self.lr))
        for _ in range(self.steps):
            z = teacher.logits(form.squash(free))[:, : answers.shape[1]]  # a network may also have an unknown class
            loss = F.cross_entropy(z / self.temperature, answers, reduction="sum")
            (slope,) = torch.autograd.grad(loss, [free])
            with torch.no_grad():
                step([free], [slope], self.lr)
        return form.squash(free).detach()


def count_outputs(teacher: Teacher, form: InputForm) -> int:
    """How many classes a teacher tells apart."""
    first = teacher.members[0]
    device = next(iter(first.posterior.mean.values())).device
    x = torch.zeros(1, *form.shape, device=device)
    with torch.no_grad():
        return int(teacher.logits(x.long() if reads_tokens(first.spec, form.shape) else x).shape[-1])


def class_similarity(members: Sequence[Single], classes: int) -> Tensor:
    """How alike networks find the classes: the cosines of their last layers' rows, averaged over the networks.

    Every row is brought to [0, 1] by its smallest and largest entry, as Dirichlet parameters cannot be negative.

    Example:
        >>> from fedfuse.core.posterior import Posterior
        >>> from fedfuse.core.spec import Spec
        >>> spec = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})
        >>> one = Single(spec, Posterior({"classifier.weight": torch.eye(2), "classifier.bias": torch.zeros(2)}))
        >>> class_similarity([one], 2)
        tensor([[1., 0.],
                [0., 1.]])
    """
    total = torch.zeros(classes, classes)
    for member in members:
        linear = [layer.weight for layer in member.spec.layout.layers if layer.kind == "linear"]
        rows = F.normalize(member.posterior.mean[linear[-1]][:classes].float().cpu()) if linear else torch.eye(classes)
        total += rows @ rows.T
    low, high = total.amin(1, keepdim=True), total.amax(1, keepdim=True)
    return (total - low) / (high - low).clamp(min=1e-12)


def wanted_answers(
    similarity: Tensor, indices: Tensor, betas: Sequence[float], draw: torch.Generator, held: Sequence[int] = ()
) -> Tensor:
    """The answers that the inputs at some places are made for: classes in turn, every β in turn, Dirichlet draws.

    With `held`, only these classes are taken in turn, and an answer is uncertain between these alone.
    """
    among = torch.tensor(held or range(len(similarity)))
    beta = torch.tensor(betas)[(indices // len(among)) % len(betas)]
    mine = torch.zeros(len(similarity)).index_fill(0, among, 1.0)
    concentration = (beta[:, None] * similarity[among[indices % len(among)]] * mine).clamp(min=1e-3)
    # Gamma draws in the logarithm, log G(a) = log G(a + 1) + log(U)/a: small parameters would underflow to 0/0
    boosted = torch._standard_gamma(concentration.double() + 1, generator=draw).log()
    uniform = torch.rand(concentration.shape, generator=draw, dtype=torch.float64).log()
    return (boosted + uniform / concentration).softmax(-1).float()


@dataclass(frozen=True, slots=True)
class Generate:
    """DENSE's generator: before every epoch a fresh one is trained for a few steps, and its best batch joins the pool.

    The generator G and the latent vectors v are moved by Adam against
    oh · CE(z(x), y) + bn · gap(x) − adv · mean 1[teacher ≠ student] KL(p_teacher ‖ p_student), x = G(v), where y are
    random labels, z the teacher's logits, and gap(x) how far the batch's statistics are from those that the members'
    batch norms remember (zero without batch norms). Views of x are augmented as the clients' training rows were.

    Attributes:
        batch: images per epoch.
        latent: length of a latent vector.
        steps: Adam's steps per epoch.
        lr: Adam's rate.
        oh: weight of the first term: images the teacher is sure of.
        bn: weight of the second: images that look like training data to the batch norms.
        adv: weight of the third: images on which the student is wrong.
        width: half the generator's feature maps.
    """

    batch: int = 256
    latent: int = 256
    steps: int = 30
    lr: float = 1e-3
    oh: float = 1.0
    bn: float = 1.0
    adv: float = 1.0
    width: int = 64
    needs: ClassVar[frozenset[str]] = frozenset()
    needs_numbers: ClassVar[bool] = True

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:
        """One batch, the best of its training."""
        form = synthetic_form(bench, [m.spec for m in teacher.members])
        draw, device = bench.stream("generate", epoch), bench.local.device
        with seeded(bench.seed, "generator", epoch):
            net = initialize_generator(generator(form, self.latent, self.width), draw).to(device)
        v = torch.randn(self.batch, self.latent, generator=draw).to(device).requires_grad_()
        labels = torch.randint(count_outputs(teacher, form), (self.batch,), generator=draw).to(device)
        moved, step = [*net.parameters(), v], stepper(Optimizer(name="adam", lr=self.lr, betas=(0.5, 0.999)))
        best, least = torch.empty(0), float("inf")
        for _ in range(self.steps):
            x = form.squash(net(v))
            view = x if bench.local.augment is None else bench.local.augment(x, draw)
            z, gap = answer_and_gap(teacher, view)
            loss = self.loss(z, answer_in_full(student, view), labels, gap)
            if float(loss.detach()) < least:
                best, least = x.detach(), float(loss.detach())
            slopes = list(torch.autograd.grad(loss, moved))
            with torch.no_grad():
                step(moved, slopes, self.lr)
        return best

    def workload(self, epochs: int, members: int, bench: Bench) -> tuple[float, float]:  # noqa: ARG002
        """A batch is made in every epoch, through all networks and the student; the pool grows by it."""
        return float(epochs * self.steps * self.batch * (members + 1)), self.batch * epochs * (epochs + 1) / 2

    def seconds(self, epochs: int, bench: Bench) -> float:
        """Those of the generator, which is far larger than most networks it serves."""
        if bench.inputs is None:
            return 0.0
        return epochs * self.steps * self.batch * _seconds_per_image(bench.inputs, self.latent, self.width)

    def loss(self, teacher: Tensor, student: Tensor, labels: Tensor, gap: Tensor) -> Tensor:
        """The three terms, from both networks' logits of a batch."""
        differ = (teacher.argmax(-1) != student.argmax(-1)).to(teacher)
        apart = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        return self.oh * F.cross_entropy(teacher, labels) + self.bn * gap - self.adv * (apart * differ).mean()


def generator(form: InputForm, latent: int, width: int) -> nn.Module:
    """DENSE's generator for images, a perceptron for feature vectors; its output still has to be squashed.

    Example:
        >>> generator(InputForm((3, 32, 32)), 16, 8)(torch.randn(2, 16)).shape
        torch.Size([2, 3, 32, 32])
    """
    if len(form.shape) == 1:
        hidden = nn.Linear(latent, 2 * width)
        return nn.Sequential(hidden, nn.BatchNorm1d(2 * width), nn.LeakyReLU(0.2), nn.Linear(2 * width, *form.shape))
    channels, height, tall = form.shape[0], form.shape[1], form.shape[2]
    small = (max(1, height // 4), max(1, tall // 4))
    return nn.Sequential(
        nn.Linear(latent, 2 * width * small[0] * small[1]),
        nn.Unflatten(1, (2 * width, *small)),
        nn.BatchNorm2d(2 * width),
        nn.Upsample(size=(max(1, height // 2), max(1, tall // 2))),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Upsample(size=(height, tall)),
        nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, channels, 3, padding=1),
    )


def _seconds_per_image(form: InputForm, latent: int, width: int, images: int = 8) -> float:
    """What an image takes a generator, there and back."""
    net, v = generator(form, latent, width), torch.zeros(images, latent).requires_grad_()
    taken = []
    for _ in range(2):  # the first fills caches
        began = time.perf_counter()
        torch.autograd.grad(net(v).sum(), [*net.parameters(), v])
        taken.append(time.perf_counter() - began)
    return min(taken) / images


def initialize_generator(net: nn.Module, draw: torch.Generator) -> nn.Module:
    """A generator with DENSE's initial values: N(0, 0.02²) weights, N(1, 0.02²) for norms, zero biases."""
    for part in net.modules():
        if isinstance(part, nn.Linear | nn.Conv2d | _NORMS):
            nn.init.normal_(part.weight, float(isinstance(part, _NORMS)), 0.02, generator=draw)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return net


def answer_and_gap(teacher: Teacher, x: Tensor) -> tuple[Tensor, Tensor]:
    """A teacher's logits, and how far this batch is from what its batch norms remember.

    The gap is, per network, Σ_norms ‖mean(h) − μ‖ + ‖var(h) − σ²‖ over the channels of what a norm reads, with the
    running statistics μ and σ² it remembers; averaged over the networks.
    """
    with _record_gaps(teacher) as gaps:
        z = teacher.at_once(x) if isinstance(teacher, Mixture) else teacher.logits(x)
    return z, torch.stack(gaps).sum() / len(teacher.members) if gaps else x.new_zeros(())


@contextmanager
def _record_gaps(teacher: Teacher) -> Iterator[list[Tensor]]:
    """Collect the gap at every batch norm that runs; all networks of one architecture run in one skeleton."""
    gaps: list[Tensor] = []

    def watch(norm: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(norm, _NORMS)
        if norm.running_mean is None or norm.running_var is None:
            return
        h = args[0].transpose(0, 1).flatten(1)
        mean, variance = h.mean(1), h.var(1, correction=0)
        gaps.append((mean - norm.running_mean).norm() + (variance - norm.running_var).norm())

    skeletons = {m.spec.skeleton() for m in teacher.members}
    norms = [part for net in skeletons for part in net.modules() if isinstance(part, _NORMS)]
    with forward_hooks((norm, watch) for norm in norms):
        yield gaps
