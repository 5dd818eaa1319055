"""Bayesian layers: every weight is a Gaussian, and the last layers of any network can be made of them.

A layer keeps its weights' means under `weight` and log σ² under `log_variance`, both parameters, so that a posterior
travels wherever a state dict travels. While training, outputs are drawn instead of weights (local reparametrisation,
Kingma et al. 2015); in evaluation a fixed number of networks is drawn and their probabilities are averaged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedfuse.core.messages import Form
from fedfuse.core.model import Single
from fedfuse.core.params import Layout, Params
from fedfuse.core.rng import seeded, stream
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.models.layers import whole
from fedfuse.tasks import CLASSIFICATION, Task, task_header, task_named

RELEASED_START = -9.0
RELEASED_BOUNDS = (-8.0, 8.0)  # the released code sees no log-variance outside, so that none below ever learns
_NARROW = 0.05  # σ at the start, in units of the usual prior's
_AT_A_TIME = 10  # networks drawn and asked together
_WITHIN = "net."  # where a `Bayesian` keeps the network
_TINY = 1e-16  # keeps the square root differentiable where nothing varies


class Factor(NamedTuple):
    """One tensor's Gaussian: its name, its mean, its log σ² as the layer sees it, and the inputs its layer sums."""

    name: str
    mean: Tensor
    log_variance: Tensor
    fan_in: int


class MeanField(nn.Module):
    """What Bayesian linear layers and convolutions share.

    They inherit from torch's own layers because that is how layouts, surgery and hooks tell a layer's kind.

    Attributes:
        weight: the means.
        log_variance: log σ² of every weight.
        bias_log_variance: log σ² of every bias, or None where biases are plain numbers.
        noise: whether training draws; without it the layer is the plain one.
        bounds: the range log σ² is clamped to when seen, if any.
    """

    weight: Tensor
    bias: Tensor | None
    log_variance: Tensor
    bias_log_variance: Tensor | None
    noise: bool
    bounds: tuple[float, float] | None

    def affine(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The plain layer with other weights: x Wᵀ + b, or a convolution padded as the layer pads."""
        out: Tensor = getattr(self, "_conv_forward", F.linear)(x, weight, bias)
        return out

    def clamp_log_variance(self, log_variance: Tensor) -> Tensor:
        """The log-variances the layer works with."""
        return log_variance if self.bounds is None else log_variance.clamp(*self.bounds)

    def factors(self) -> Iterator[Factor]:
        """The Gaussians this layer holds."""
        fan_in = self.weight[0].numel()
        yield Factor("weight", self.weight, self.clamp_log_variance(self.log_variance), fan_in)
        if self.bias is not None and self.bias_log_variance is not None:
            yield Factor("bias", self.bias, self.clamp_log_variance(self.bias_log_variance), fan_in)

    def forward(self, input: Tensor) -> Tensor:
        """Output at the means; while training, a draw from N(x μᵀ + b, x² (σ²)ᵀ), of its own for every example."""
        mean = self.affine(input, self.weight, self.bias)
        if not (self.training and self.noise):
            return mean
        bias_variance = (
            None if self.bias_log_variance is None else self.clamp_log_variance(self.bias_log_variance).exp()
        )
        variance = self.affine(input.square(), self.clamp_log_variance(self.log_variance).exp(), bias_variance)
        return mean.addcmul((variance + _TINY).sqrt(), torch.randn_like(mean))


class BayesLinear(MeanField, nn.Linear):  # type: ignore[misc]  # torch forgets that a bias may be None
    """A linear layer whose weights are Gaussians."""


class BayesConv1d(MeanField, nn.Conv1d):
    """A convolution over sequences whose weights are Gaussians."""


class BayesConv2d(MeanField, nn.Conv2d):
    """A convolution over images whose weights are Gaussians; noise is drawn per output, a usual approximation."""


class BayesConv3d(MeanField, nn.Conv3d):
    """A convolution over volumes whose weights are Gaussians."""


def mean_fields(model: nn.Module) -> list[tuple[str, MeanField]]:
    """A network's Bayesian layers with their names."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, MeanField)]


def factors(model: nn.Module) -> Iterator[Factor]:
    """The Gaussians of all Bayesian layers of a network, under their full names."""
    return factors_of(mean_fields(model))


def factors_of(layers: Sequence[tuple[str, MeanField]]) -> Iterator[Factor]:
    """The Gaussians of these layers, under their full names."""
    for path, layer in layers:
        for factor in layer.factors():
            yield factor._replace(name=f"{path}.{factor.name}" if path else factor.name)


class Bayesian(nn.Module):
    """A network some of whose layers are Bayesian, and which answers for all of its posterior.

    In evaluation it gives log p(y | x) = log (1/S) Σ_s softmax(f(x; w_s)): S networks w_s ~ q drawn from a seed of
    its own, so that a row's answer depends neither on the other rows nor on earlier calls. With `noise` off
    it answers at the means.

    Attributes:
        net: the network, its layers replaced.
        draws: how many networks are drawn.
        seed: fixes the draws.
        task: what its outputs mean: what is averaged over the draws.
    """

    def __init__(self, net: nn.Module, draws: int = 100, seed: int = 0, task: str = "classification") -> None:
        super().__init__()
        self.task = task_named(task)
        self.net = net
        self.draws = draws
        self.seed = seed

    @property
    def noise(self) -> bool:
        """Whether its layers draw at all."""
        return any(layer.noise for _, layer in mean_fields(self.net))

    @property
    def layout(self) -> Layout:
        """The layout of the network within."""
        return Layout.of(self.net).under("net")

    def forward(self, x: Tensor, apart: bool = False, draws: int | None = None, seed: int | None = None) -> Tensor:
        """Outputs of one noisy pass while training, else those of the mean prediction over the draws.

        Args:
            x: a batch.
            apart: give every draw's outputs, draws × rows × outputs, instead of their average.
            draws: how many networks are drawn, if not as many as usual.
            seed: of the draws, if not its own.
        """
        if self.training or not self.noise:
            logits: Tensor = self.net(x)
            return logits[None] if apart else logits
        common, rest = _halves(self.net)
        x = common(x)
        seed, count = self.seed if seed is None else seed, self.draws if draws is None else draws
        linear = all(isinstance(layer, BayesLinear) for _, layer in mean_fields(rest))
        each = torch.cat([answer_each(rest, weights, x, linear) for weights in self._draw_weights(seed, count)])
        return each if apart else self.task.average(each)

    def _draw_weights(self, seed: int, count: int) -> Iterator[dict[str, Tensor]]:
        """The Bayesian layers' weights of `count` networks, stacked a few at a time to bound memory."""
        for begin in range(0, count, _AT_A_TIME):
            drawn = {}
            for name, mean, log_variance, _ in factors(self.net):
                # ten at a time however many are wanted: fewer draws are the first ones of more
                draw = stream(seed, "draw", name, begin)
                noise = torch.randn((_AT_A_TIME, *mean.shape), generator=draw)[: count - begin]
                drawn[name] = mean + (log_variance / 2).exp() * noise.to(mean)
            yield drawn


def _halves(net: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A sequence before and from its first Bayesian layer on, so that draws share what does not vary."""
    if type(net) is not nn.Sequential or net._forward_hooks:  # a hook that picks an output sees the whole network
        return nn.Identity(), net
    plain = len(list(takewhile(lambda part: not mean_fields(part), net)))
    return net[:plain], net[plain:]


def answer_each(net: nn.Module, weights: Mapping[str, Tensor], x: Tensor, together: bool = True) -> Tensor:
    """The outputs of networks that differ in some weights, networks × what the network gives.

    Args:
        net: the network.
        weights: for some of its parameters, one value per network, stacked.
        x: what all are asked.
        together: whether to try one pass for all. Convolutions with kernels of their own for every network are slower
            so, and a network may do what cannot be done for many at once, such as read a number off a tensor.

    Example:
        >>> answer_each(nn.Linear(1, 1, bias=False), {"weight": torch.tensor([[[2.0]], [[3.0]]])}, torch.ones(1, 1))
        tensor([[[2.]],
        <BLANKLINE>
                [[3.]]])
    """
    weights = _with_tied(net, weights)
    ask = partial(functional_call, net, args=(x,), tie_weights=False)  # torch leaves what it ties in shared modules
    if together:
        with contextlib.suppress(RuntimeError):
            answers: Tensor = vmap(ask)(weights)
            return answers
    count = len(next(iter(weights.values())))
    return torch.stack([ask({name: stacked[place] for name, stacked in weights.items()}) for place in range(count)])


def _with_tied(net: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under every other name too that one of their parameters has in another module."""
    places = [  # each module once, so that a shared one keeps its first name
        (f"{path}.{leaf}" if path else leaf, id(parameter))
        for path, part in net.named_modules()
        for leaf, parameter in part._parameters.items()
    ]
    known = {place: name for name, place in places if name in weights}
    return {name: weights[known[place]] for name, place in places if place in known}


def bayesian(
    model: nn.Module,
    last: int = 1,
    layers: Sequence[str] = (),
    *,
    log_variance: float | None = None,
    bias: bool = False,
    noise: bool = True,
    released: bool = False,
    draws: int = 100,
    seed: int = 0,
    task: str = "classification",
) -> Bayesian:
    """Make the last layers of a network Bayesian; their means are the weights it has now.

    Linear layers and convolutions count, in order of registration. The network is changed in place and comes back
    within a `Bayesian`, which averages probabilities in evaluation.

    Args:
        model: any network.
        last: how many layers, counted from the end.
        layers: the layers' names, in place of `last`.
        log_variance: log σ² every weight starts with; by default σ is a twentieth of 1/√fan-in.
        bias: whether biases are Gaussians too; else they are plain numbers.
        noise: whether anything is drawn; False gives the same layers as a control without noise.
        released: as the released code starts: log σ² ~ N(−9, 0.001²) clamped to [−8, 8], so that it never learns,
            means from N(0, 1/fan_in) and zero biases, drawn from torch's global generator.
        draws: networks drawn in evaluation.
        seed: fixes those draws.
        task: what the outputs mean: probabilities of classes are averaged, or of "yes", or numbers.

    Raises:
        ConfigError: if there are not as many layers, or one cannot be Bayesian.

    Example:
        >>> net = bayesian(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), last=1)
        >>> sorted(net.state_dict())
        ['net.0.bias', 'net.0.weight', 'net.2.bias', 'net.2.log_variance', 'net.2.weight']
        >>> tuple(net.eval()(torch.ones(2, 4)).shape), tuple(net(torch.ones(2, 4), apart=True).shape)
        ((2, 3), (100, 2, 3))
    """
    chosen = _chosen_layers(model, last, layers)
    twins = {id(layer): _twin(name, layer, log_variance, bias, noise, released) for name, layer in chosen}
    for path, part in list(model.named_modules(remove_duplicate=False)):
        if id(part) in twins and path:
            model.set_submodule(path, twins[id(part)])
    made = Bayesian(twins.get(id(model), model), whole("bayesian", "draws", draws), seed, task)
    made.training = model.training
    return made


def _chosen_layers(model: nn.Module, last: int, names: Sequence[str]) -> list[tuple[str, PlainLayer]]:
    found = {name: part for name, part in model.named_modules() if isinstance(part, PlainLayer)}
    if unknown := [name for name in names if name not in found]:
        raise ConfigError(
            f"bayesian: there is no linear layer or convolution {unknown[0]!r}; "
            f"{type(model).__name__} has {', '.join(found)}"
        )
    if names:
        return [(name, found[name]) for name in names]
    if whole("bayesian", "last", last) > len(found):
        raise ConfigError(
            f"bayesian: last is {last}, expected at most {len(found)}, "
            f"as many linear layers and convolutions as {type(model).__name__} has"
        )
    return list(found.items())[-last:]


PlainLayer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_TWINS: Mapping[type[PlainLayer], type[MeanField]] = {
    nn.Linear: BayesLinear,
    nn.Conv1d: BayesConv1d,
    nn.Conv2d: BayesConv2d,
    nn.Conv3d: BayesConv3d,
}
_SIZES: Mapping[type[PlainLayer], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    **dict.fromkeys(
        (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
    ),
}


def _twin(
    name: str, layer: PlainLayer, log_variance: float | None, bias: bool, noise: bool, released: bool
) -> MeanField:
    """The Bayesian layer with a plain layer's sizes and its very parameters."""
    if isinstance(layer, MeanField) or type(layer) not in _TWINS:
        raise ConfigError(
            f"bayesian: layer {name!r} is a {type(layer).__name__}, expected a plain linear layer or convolution, "
            "whose forward pass is known; name other layers"
        )
    sizes = {size: getattr(layer, size) for size in _SIZES[type(layer)]}
    twin = _TWINS[type(layer)](**sizes, bias=layer.bias is not None, device="meta")
    twin.weight, twin.bias = layer.weight, layer.bias
    first = usual_log_variance(twin.weight) if log_variance is None else log_variance
    twin.log_variance = nn.Parameter(torch.full_like(twin.weight, first))
    log_variances = torch.full_like(twin.bias, first) if bias and twin.bias is not None else None
    twin.bias_log_variance = None if log_variances is None else nn.Parameter(log_variances)
    twin.noise, twin.bounds, twin.training = noise, None, layer.training
    return _as_released(twin) if released else twin


@torch.no_grad()
def _as_released(layer: MeanField) -> MeanField:
    layer.bounds = RELEASED_BOUNDS
    layer.weight.normal_(0.0, layer.weight[0].numel() ** -0.5)
    if layer.bias is not None:
        layer.bias.zero_()
    for log_variances in (layer.log_variance, layer.bias_log_variance):
        if log_variances is not None:
            log_variances.normal_(RELEASED_START, 0.001)
    return layer


def prior_log_variance(fan_in: int, scale: float) -> float:
    """Log-variance of the prior that is usual for a layer: scale²/fan-in.

    Example:
        >>> round(math.exp(prior_log_variance(100, 2.0)), 9)
        0.04
    """
    return 2 * math.log(scale) - math.log(fan_in)


def usual_log_variance(weight: Tensor) -> float:
    """Where log σ² of a layer's weights starts: σ is a twentieth of 1/√fan-in, the usual prior's deviation.

    Example:
        >>> usual_log_variance(torch.zeros(10, 100)) < prior_log_variance(100, 1.0)
        True
    """
    return prior_log_variance(weight[0].numel(), _NARROW)


def build_bayesian(of: Mapping[str, Any], **options: Any) -> Bayesian:
    """The model factory "bayesian": a network built from the spec in `of`, with options of `bayesian`.

    Example:
        >>> build_bayesian({"factory": "mlp", "options": {"inputs": 4, "hidden": []}}, last=1).net.classifier
        BayesLinear(in_features=4, out_features=10, bias=True)
    """
    spec = Spec.from_json(of, trusted=Spec("bayesian", {"of": of}).factories)  # trust was checked with the whole spec
    return bayesian(spec.build(), **options)


@dataclass(frozen=True, slots=True)
class BayesianLayers:
    """Prepares a network: its last layers become Bayesian, their means stay where they are.

    The spec that comes out names the one that went in, so that files and other processes can rebuild it.
    """

    last: int = 1
    layers: tuple[str, ...] = ()
    log_variance: float | None = None
    bias: bool = False
    noise: bool = True
    released: bool = False
    draws: int = 100

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:  # noqa: ARG002
        """The start with Bayesian layers; a network that has them stays as it is."""
        if isinstance(start.spec.skeleton(), Bayesian):
            return start
        options = asdict(self) | task_header(task)
        with seeded(seed, "bayesian"):
            plain = start.spec.build()
            plain.load_state_dict(dict(start.posterior.mean))
            module = bayesian(plain, **options)
        prototype = module if start.spec.prototype is not None else None
        spec = Spec("bayesian", {"of": start.spec.to_json(), **options}, prototype=prototype)
        return Single.of(module, spec)

    def weights_from(self, plain: Params, trained: Params) -> Params:
        """What a network with these plain weights begins with, read off a trained one, without the network's code."""
        begin = {f"{_WITHIN}{name}": tensor for name, tensor in plain.items()}
        for mean, log_variance in Layout.guess(trained).log_variances.items():
            weight = begin.get(mean.removesuffix("bias") + "weight" if mean.endswith("bias") else mean)
            if weight is not None and mean in begin:
                first = usual_log_variance(weight) if self.log_variance is None else self.log_variance
                begin[log_variance] = torch.full_like(begin[mean], first)
        return begin

    def without_variances(self, trained: Params) -> tuple[Params, Params]:
        """The means under the names of the plain network, and σ² of every Gaussian under the name of its mean.

        Example:
            >>> trained = bayesian(nn.Sequential(nn.Linear(4, 3))).state_dict()
            >>> [sorted(part) for part in BayesianLayers().without_variances(trained)]
            [['0.bias', '0.weight'], ['0.weight']]
        """
        logs, variances = Layout.guess(trained).log_variances, dict[str, Tensor]()
        for mean, log_variance in logs.items():
            seen = trained[log_variance].clamp(*RELEASED_BOUNDS) if self.released else trained[log_variance]
            variances[mean.removeprefix(_WITHIN)] = seen.exp()
        hidden = set(logs.values())
        return {n.removeprefix(_WITHIN): t for n, t in trained.items() if n not in hidden}, variances

    def with_means(self, trained: Params, plain: Params) -> Params:
        """Trained weights with those replaced that are given, under the names of either network."""
        return {n: plain.get(n, plain.get(n.removeprefix(_WITHIN), tensor)) for n, tensor in trained.items()}

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:  # noqa: ARG002
        """Log-variances for the means of some layer."""
        return None if layout.log_variances else "layers with log-variances beside their weights"
