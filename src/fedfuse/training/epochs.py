"""An epoch of local training, by torch's autograd or by compiled kernels: the same batches, the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fedfuse.core.inputs import convolves_images, example_inputs
from fedfuse.core.rng import seeded
from fedfuse.core.seams import Batch, Free, Work
from fedfuse.core.spec import Spec, logits_in
from fedfuse.core.state import Local
from fedfuse.errors import ConfigError, FuseError
from fedfuse.kernels import chain_for
from fedfuse.kernels.chain.description import VarianceLearning
from fedfuse.tasks import Classification
from fedfuse.training.optimizers import Stepper, log_variance_step, shape_gradients, stepper
from fedfuse.training.pulls import pull_of

if TYPE_CHECKING:
    from fedfuse.kernels.chain.network import Chain, Round


_ROWS = 2


class _Pass(NamedTuple):
    """What one pass forward and back gives."""

    logits: Tensor
    slopes: Tensor


@lru_cache(maxsize=16)
def suits_channels_last(spec: Spec, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> bool:
    """Whether a network that convolves images trains the same with channels last, and its rows may lie so.

    A network of ours does. Any other is tried once on inputs that are the same for every client: in evaluation, where
    nothing is drawn, logits and gradients must agree, and in training nothing may be raised. So a client's answer
    does not depend on who came first, and a network that asks how its tensors lie (by `view`) finds them as written.

    Raises:
        ConfigError: if the network gives no logits, before anybody trains.

    Example:
        >>> suits_channels_last(Spec("lenet"), (1, 28, 28), torch.float32, "cpu")
        True
    """
    images = convolves_images(spec, shape)
    if spec.is_ours and spec.prototype is None:
        return images
    with seeded(0, "layout"), torch.enable_grad():
        x = example_inputs(spec, shape, _ROWS, dtype).to(device)
        plain = _try_format(spec, x, torch.contiguous_format)
        other = _try_format(spec, x, torch.channels_last) if images and plain else None
    return plain is not None and other is not None and all(_agree(a, b) for a, b in zip(plain, other, strict=True))


def _try_format(spec: Spec, x: Tensor, form: torch.memory_format) -> _Pass | None:
    """One trial with tensors in this order, or None if the network raised something; a copy is used up for it."""
    module = spec.build().to(x.device)
    if form == torch.channels_last:
        module, x = module.to(memory_format=form), x.contiguous(memory_format=form)  # type: ignore[call-overload]
    try:
        found = _pass(module.eval(), x, spec)
        _pass(module.train(), x, spec)
    except FuseError:
        raise
    except Exception:  # the user's own forward: what it raises on real rows is told where it trains
        return None
    return found


def _pass(module: nn.Module, x: Tensor, spec: Spec) -> _Pass:
    with seeded(0, "layout", "pass"):
        logits = logits_in(module(x), spec.factory)
        params = [p for p in module.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(logits.square().sum(), params, materialize_grads=True) if params else ()
    return _Pass(logits.detach().flatten(), torch.cat([logits.new_zeros(1), *(s.flatten() for s in slopes)]))


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    return bool((a - b).double().norm() <= torch.finfo(a.dtype).eps ** 0.5 * a.double().norm())


class Epochs(Protocol):
    """Goes through a client's rows, an epoch at a time, and counts its steps."""

    def run(self, epoch: int) -> float:
        """One epoch, or what `max_steps` leaves of it; gives the batches' mean loss."""
        ...

    def finish(self) -> None:
        """Leave the trained weights in the client's network."""
        ...


@dataclass(slots=True)
class TorchEpochs:
    """By autograd: any network, any objective."""

    local: Local
    work: Work
    _names: list[str] = field(init=False)
    _weights: int = field(init=False)
    _step: Stepper = field(init=False)

    def __post_init__(self) -> None:
        roles = self.local.brief.spec.layout.roles
        self._names = sorted(self.local.live, key=lambda name: roles.get(name) == "log_variance")
        self._weights = sum(roles.get(name) != "log_variance" for name in self._names)
        self._step = stepper(self.work.settings.optimizer)

    def run(self, epoch: int) -> float:
        """A gradient of the objective, a step and a projection for every batch."""
        local, params = self.local, list[Tensor](self.local.live[name] for name in self._names)
        total, count = torch.zeros(()), 0
        for batch in _batches(local, epoch):
            loss = self.work.objective(local, batch)
            grads = list(torch.autograd.grad(loss, params, materialize_grads=True))
            with torch.no_grad():
                self._move(params, grads)
            total += loss.detach().cpu()
            count += 1
            local.steps += 1
        return float(total) / max(count, 1)

    def _move(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """One step of the weights and of the log-variances, and a projection."""
        local, settings, project, weights = self.local, self.work.settings, self.work.project, self._weights
        shape_gradients(params[:weights], grads[:weights], settings)
        self._step(params[:weights], grads[:weights], local.lr)
        if weights < len(params):
            rate = local.lr * _log_variance_rate(local)
            log_variance_step(params[weights:], grads[weights:], rate, local.all_examples)
        if not isinstance(project, Free):
            for name, value in zip(self._names, params, strict=True):
                value.copy_(project(name, value, local.brief))

    def finish(self) -> None:
        """Nothing is left to do: the network's own weights were trained."""


@dataclass(slots=True)
class CompiledEpochs:
    """By compiled kernels: chains of layers they know, and a cross entropy with pulls."""

    local: Local
    chain: Chain
    round: Round

    def run(self, epoch: int) -> float:
        """All batches in one call; augmented rows are made beforehand."""
        local, rows = self.local, self.local.rows
        order, x, y = _order(local, epoch), rows.x, rows.y
        if local.settings.augment is not None and len(order):
            x, y = torch.cat([x for x, _ in _draw_batches(local, epoch, order)]), y.index_select(0, order)
            order = torch.arange(len(order))
        losses = self.chain.batches(self.round, x, y, order, local.lr, local.stream("dropout", epoch))
        local.steps += len(losses)
        return sum(losses) / max(len(losses), 1)

    def finish(self) -> None:
        """Copy the weights back."""
        self.chain.finish(self.local.module)


def compiled_epochs(local: Local, work: Work) -> Epochs | None:
    """Compiled kernels, if they are wanted and know everything that this training asks for.

    Raises:
        ConfigError: if the user insists on them and they do not.
    """
    if work.settings.kernel == "torch":
        return None
    pull = pull_of(work.objective, local)
    classes = isinstance(local.task, Classification)
    gaussian = any(role == "log_variance" for role in local.brief.spec.layout.roles.values())
    if pull is not None and gaussian and (pull.mu or pull.linear):
        pull = None  # log-variances would be pulled, too
    if pull is None or not classes or not isinstance(work.project, Free):
        if work.settings.kernel == "compiled":
            wrong = local.task if not classes else work.objective if pull is None else work.project
            raise ConfigError(
                f'kernel = "compiled" cannot train this: it does not know {type(wrong).__name__}; '
                'use kernel = "auto" or "torch"'
            )
        return None
    chain = chain_for(local.module, local.rows, work.settings, local.live.keys())
    if chain is None:
        return None
    local.compiled = True
    learn = VarianceLearning(_log_variance_rate(local), local.all_examples, pull.kl, pull.priors) if gaussian else None
    began = chain.begin(local.module, work.settings, pull.mu, local.anchor, pull.linear, learn)
    return CompiledEpochs(local, chain, began)


def _log_variance_rate(local: Local) -> float:
    """The rate of log-variances for every unit of the weights' rate.

    Time is counted in epochs: were it counted in steps, clients with few rows would leave variances near the narrow
    start, and a rule that weighs by precision would take them for the surest of all.
    """
    settings = local.settings
    steps = max(1, settings.steps_per_epoch(len(local.rows)))
    return settings.log_variance_lr / steps / settings.optimizer.lr


def _order(local: Local, epoch: int) -> Tensor:
    """The rows of an epoch's batches in a new order, as far as `drop_last` and `max_steps` allow."""
    settings, count = local.settings, len(local.rows)
    order = torch.randperm(count, generator=local.stream("order", epoch))
    if settings.drop_last:
        order = order[: count - count % settings.batch_size]
    if settings.max_steps is not None:
        order = order[: (settings.max_steps - local.steps) * settings.batch_size]
    return order


def _draw_batches(local: Local, epoch: int, order: Tensor) -> Iterator[Batch]:
    """Index batches, augmented where that is asked for."""
    settings, rows, draw = local.settings, local.rows, local.stream("augment", epoch)
    for index in order.to(rows.y.device).split(settings.batch_size) if len(order) else ():
        x = _select_rows(rows.x, index)
        if settings.augment is not None:
            x = settings.augment(x, draw)
        yield x, rows.y.index_select(0, index)


def _batches(local: Local, epoch: int) -> Iterator[Batch]:
    """An epoch's batches; a batch of one passes batch norms by their running statistics."""
    for x, y in _draw_batches(local, epoch, _order(local, epoch)):
        norms = [n for n in _batch_norms(local.module) if n.training] if len(y) == 1 else []
        for norm in norms:
            norm.eval()
        yield x, y
        for norm in norms:
            norm.train()


def _select_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] several times faster; channels last stay last."""
    if x.ndim == 4 and not x.is_contiguous():
        return x.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)
    return x.index_select(0, index)


def _batch_norms(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
