"""A network as a chain of layers the kernels know, found by following an input through it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedfuse.kernels.chain.description import (
    Activation,
    Conv,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MeanFieldLinear,
    Norm,
    PoolLayer,
    Shape,
    Uncovered,
    shape_after,
)
from fedfuse.models.bayes import BayesLinear, MeanField


def chain_of(module: nn.Module, shape: Shape) -> tuple[Layer, ...]:
    """The layers of a network in their order, for inputs of this shape.

    Raises:
        Uncovered: naming the first part that the kernels do not do.

    Example:
        >>> [type(layer).__name__ for layer in chain_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,))]
        ['Linear', 'Activation']
    """
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in module.modules()):
        raise Uncovered("a module with hooks")
    layers = list(_follow(_graph(module), dict(module.named_modules()), shape))
    names = [layer.name for layer in layers if isinstance(layer, Conv | Linear | Norm)]
    if len(set(names)) < len(names):
        raise Uncovered("a layer used twice")
    norms = {layer.name for layer in layers if isinstance(layer, Norm)}
    if wrong := [name for name, _ in module.named_buffers() if name.rpartition(".")[0] not in norms]:
        raise Uncovered(f"the buffer {wrong[0]!r}, which a forward may change")
    return tuple(_pool_first(layers))


def _graph(module: nn.Module) -> fx.Graph:
    """The steps of a forward, taken on a copy: it is the user's own code, and may leave something in the network."""
    tried = copy.deepcopy(module)
    more = len(signature(tried.forward).parameters) > 1  # its other arguments keep their defaults
    try:
        graph = _LayerTracer().trace(_AskedPlainly(tried) if more else tried)
    except Exception as why:  # it may raise anything, too
        raise Uncovered(f"a forward that cannot be traced ({type(why).__name__})") from why
    if _attributes(tried) != _attributes(module):
        raise Uncovered("a forward that changes the network's attributes")
    for node in graph.nodes if more else ():
        if node.op == "call_module":
            node.target = str(node.target).removeprefix("asked.")
    return graph


class _LayerTracer(fx.Tracer):
    """Bayesian layers are steps of their own, as torch's layers are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether its forward is left alone."""
        return isinstance(m, MeanField) or super().is_leaf_module(m, module_qualified_name)


class _AskedPlainly(nn.Module):
    """A network that is given rows and nothing else."""

    def __init__(self, asked: nn.Module) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, x: Tensor) -> Any:
        """Whatever it answers."""
        return self.asked(x)


def _attributes(module: nn.Module) -> list[dict[str, object]]:
    """The plain values that the parts of a network hold."""
    plain = (bool, int, float, str, type(None))
    return [{k: v for k, v in vars(part).items() if isinstance(v, plain)} for part in module.modules()]


def _pool_first(layers: list[Layer]) -> list[Layer]:
    """Max-pooling before ReLU: the maximum commutes with it, in value and in gradient, at a quarter of the work."""
    layers = list(layers)
    for i in range(len(layers) - 1):
        first, second = layers[i : i + 2]
        if first == Activation("relu") and isinstance(second, PoolLayer) and second.kind == "max":
            layers[i : i + 2] = [second, first]
    return layers


def _follow(graph: fx.Graph, parts: Mapping[str, nn.Module], shape: Shape) -> Iterator[Layer]:
    """Walk from the input to the output; every step must read the one before, and nothing else."""
    last: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder" and last is None:
            last = node
        elif node.op == "output":
            if node.args != (last,):
                raise Uncovered("an output that is not the last layer's")
        elif not _is_about_sizes(node):
            if node.all_input_nodes[:1] != [last] or _reads_others(node):
                raise Uncovered(f"a step that reads more than the one before it: {_what(node, parts)}")
            layer = _layer(node, parts, shape)
            last = node
            if layer is not None:
                yield layer
                shape = shape_after(layer, shape)


def _is_about_sizes(node: fx.Node) -> bool:
    """Whether a step only asks how large something is: x.size(0), x.shape[0]."""
    if node.op == "call_method":
        return node.target == "size"
    if node.op == "call_function" and node.target in (getattr, operator.getitem):
        return node.target is operator.getitem or node.args[1] == "shape"
    return False


def _reads_others(node: fx.Node) -> bool:
    return any(not _is_about_sizes(other) for other in node.all_input_nodes[1:])


def _what(node: fx.Node, parts: Mapping[str, nn.Module]) -> str:
    """A step's name for a user: its module's class and path, or the function's name."""
    if node.op == "call_module":
        return f"{type(parts[str(node.target)]).__name__} {node.target!r}"
    return getattr(node.target, "__name__", str(node.target))


def _layer(node: fx.Node, parts: Mapping[str, nn.Module], shape: Shape) -> Layer | None:
    """The layer of one step; None if it does nothing."""
    what = _what(node, parts)
    if node.op == "call_module":
        module = parts[str(node.target)]
        make = _MODULES.get(type(module))
        found = make(str(node.target), module, shape) if make else Uncovered(what)
    else:
        find = _METHODS.get(str(node.target)) if node.op == "call_method" else _FUNCTIONS.get(node.target)
        found = find(_FunctionCall(node, shape)) if find else Uncovered(what)
    if isinstance(found, Uncovered):
        raise Uncovered(str(found) if str(found) != what else what) from None
    return found


Found: TypeAlias = Layer | Uncovered | None


def _single(value: Any) -> int | None:
    """One number for both axes, if it is one."""
    if isinstance(value, int):
        return value
    if isinstance(value, tuple | list) and len(value) == 2 and value[0] == value[1] and isinstance(value[0], int):
        return int(value[0])
    return None


def _conv(name: str, m: Any, shape: Shape) -> Found:
    kernel, stride, padding = _single(m.kernel_size), _single(m.stride), _single(m.padding)
    wrong = None in (kernel, stride, padding) or m.dilation != (1, 1) or m.groups != 1 or m.padding_mode != "zeros"
    if wrong or len(shape) != 3 or m.in_channels != shape[0] or padding >= kernel:  # type: ignore[operator]
        return Uncovered(f"Conv2d {name!r} with {_oddity(m)}")
    return Conv(name, m.out_channels, kernel, stride, padding, m.bias is not None)  # type: ignore[arg-type]


def _oddity(m: Any) -> str:
    """What a convolution has that ours do not."""
    if m.groups != 1:
        return f"groups={m.groups}"
    if m.dilation != (1, 1):
        return f"dilation={m.dilation}"
    return f"kernel_size={m.kernel_size}, stride={m.stride}, padding={m.padding!r}, padding_mode={m.padding_mode!r}"


def _linear(name: str, m: Any, shape: Shape) -> Found:
    if shape != (m.in_features,):
        return Uncovered(f"Linear {name!r} on inputs of shape {shape}")
    return Linear(name, m.out_features, m.bias is not None)


def _mean_field(name: str, m: Any, shape: Shape) -> Found:
    if m.bounds is not None or m.bias_log_variance is not None:
        return Uncovered(f"BayesLinear {name!r} with {'clamped log-variances' if m.bounds else 'Gaussian biases'}")
    plain = _linear(name, m, shape)
    return MeanFieldLinear(name, plain.outputs, plain.bias, m.noise) if isinstance(plain, Linear) else plain


def _norm(name: str, m: Any, shape: Shape) -> Found:
    axes = 3 if isinstance(m, nn.BatchNorm2d) else 1
    if (
        len(shape) != axes
        or m.num_features != shape[0]
        or not m.affine
        or not m.track_running_stats
        or m.momentum is None
    ):
        return Uncovered(f"{type(m).__name__} {name!r} on {shape} without weights, statistics or momentum")
    return Norm(name, float(m.eps), float(m.momentum))


def _pool(kind: Literal["max", "mean"], kernel: Any, stride: Any, padding: Any, shape: Shape) -> Found:
    k, s, p = _single(kernel), _single(kernel if stride is None else stride), _single(padding)
    if k is None or s is None or p is None or len(shape) != 3 or (p and kind == "mean"):
        return Uncovered(f"{kind} pooling with kernel_size={kernel}, stride={stride}, padding={padding}")
    return PoolLayer(kind, k, s, p)


def _max_pool(_: str, m: Any, shape: Shape) -> Found:
    if m.dilation not in (1, (1, 1)) or m.ceil_mode or m.return_indices:
        return Uncovered("MaxPool2d with dilation, ceil_mode or return_indices")
    return _pool("max", m.kernel_size, m.stride, m.padding, shape)


def _mean_pool(_: str, m: Any, shape: Shape) -> Found:
    if m.ceil_mode or m.divisor_override:
        return Uncovered("AvgPool2d with ceil_mode or divisor_override")
    return _pool("mean", m.kernel_size, m.stride, m.padding, shape)


def _adaptive(kind: Literal["max", "mean"], size: Any, shape: Shape) -> Found:
    """Adaptive pooling where it is plain pooling: the output's side divides the input's."""
    side = _single(size)
    if side is None or len(shape) != 3 or shape[1] != shape[2] or shape[1] % side:
        return Uncovered(f"adaptive pooling of {shape[1:]} to {size}")
    return PoolLayer(kind, shape[1] // side, shape[1] // side)


def _dropout(p: float, training: bool = True) -> Found:
    if not training or p == 0:
        return None
    return Dropout(p) if 0 < p < 1 else Uncovered(f"Dropout with p={p}")


def _relu(slope: float) -> Found:
    return Activation("relu", slope) if 0 <= slope < 1 else Uncovered(f"LeakyReLU with negative_slope={slope}")


def _flatten(start: Any, end: Any, shape: Shape) -> Found:
    if start != 1 or end not in (-1, len(shape)):
        return Uncovered(f"Flatten from {start} to {end}")
    return Flatten() if len(shape) > 1 else None


_MODULES: Mapping[type[nn.Module], Callable[[str, Any, Shape], Found]] = {
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    BayesLinear: _mean_field,
    nn.BatchNorm1d: _norm,
    nn.BatchNorm2d: _norm,
    nn.ReLU: lambda *_: _relu(0.0),
    nn.LeakyReLU: lambda _, m, _s: _relu(float(m.negative_slope)),
    nn.Tanh: lambda *_: Activation("tanh"),
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _mean_pool,
    nn.AdaptiveAvgPool2d: lambda _, m, s: _adaptive("mean", m.output_size, s),
    nn.AdaptiveMaxPool2d: lambda _, m, s: _adaptive("max", m.output_size, s),
    nn.Dropout: lambda _, m, _s: _dropout(m.p, m.training),
    nn.Flatten: lambda _, m, s: _flatten(m.start_dim, m.end_dim, s),
    nn.Identity: lambda *_: None,
}


@dataclass(frozen=True, slots=True)
class _FunctionCall:
    """A function's or method's arguments, after the tensor it works on."""

    node: fx.Node
    shape: Shape

    def get(self, index: int, name: str, default: Any) -> Any:
        rest = self.node.args[1:]
        return rest[index] if index < len(rest) else self.node.kwargs.get(name, default)


def _call_pool(kind: Literal["max", "mean"]) -> Callable[[_FunctionCall], Found]:
    def find(call: _FunctionCall) -> Found:
        # torch.fx gives max_pool2d's defaults by name
        plain = {"dilation": 1, "ceil_mode": False, "return_indices": False, "count_include_pad": True}
        plain["divisor_override"] = None  # type: ignore[assignment]
        names = ("kernel_size", "stride", "padding")
        extra = {k: v for k, v in call.node.kwargs.items() if k not in names}
        if len(call.node.args) > 4 or any(k not in plain or plain[k] != v for k, v in extra.items()):
            return Uncovered(f"{kind} pooling with {', '.join(extra) or 'more arguments'}")
        kernel, stride, padding = (call.get(i, n, d) for i, (n, d) in enumerate(zip(names, (0, None, 0), strict=True)))
        return _pool(kind, kernel, stride, padding, call.shape)

    return find


def _view(call: _FunctionCall) -> Found:
    """x.view(x.size(0), -1) and its like: everything but the rows in one axis."""
    sizes = call.node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple):
        sizes = sizes[0]
    features = int(torch.Size(call.shape).numel())
    rows_kept = len(sizes) == 2 and (isinstance(sizes[0], fx.Node) or sizes[0] == -1)
    if not rows_kept or not (sizes[1] == features or (sizes[1] == -1 and isinstance(sizes[0], fx.Node))):
        return Uncovered(f"{call.node.target}{tuple(map(str, sizes))}")
    return Flatten() if len(call.shape) > 1 else None


def _call_flatten(call: _FunctionCall) -> Found:
    return _flatten(call.get(0, "start_dim", 0), call.get(1, "end_dim", -1), call.shape)


_FUNCTIONS: Mapping[Any, Callable[[_FunctionCall], Found]] = {
    F.relu: lambda _: _relu(0.0),
    torch.relu: lambda _: _relu(0.0),
    F.leaky_relu: lambda call: _relu(float(call.get(0, "negative_slope", 0.01))),
    F.tanh: lambda _: Activation("tanh"),
    torch.tanh: lambda _: Activation("tanh"),
    F.max_pool2d: _call_pool("max"),
    torch.max_pool2d: _call_pool("max"),
    F.avg_pool2d: _call_pool("mean"),
    F.adaptive_avg_pool2d: lambda call: _adaptive("mean", call.get(0, "output_size", None), call.shape),
    F.dropout: lambda call: _dropout(call.get(0, "p", 0.5), bool(call.get(1, "training", True))),
    torch.flatten: _call_flatten,
    torch.reshape: _view,
}

_METHODS: Mapping[str, Callable[[_FunctionCall], Found]] = {
    "relu": lambda _: _relu(0.0),
    "tanh": lambda _: Activation("tanh"),
    "view": _view,
    "reshape": _view,
    "flatten": _call_flatten,
    "contiguous": lambda _: None,
}
