"""Params, and the Layout that says what each tensor of a model is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

Params: TypeAlias = Mapping[str, Tensor]
Role: TypeAlias = Literal["weight", "bias", "norm", "log_variance", "statistic", "counter"]
LayerKind: TypeAlias = Literal["linear", "conv", "transposed", "turned", "embedding", "attention", "other"]

PARAMETERS: tuple[Role, ...] = ("weight", "bias", "norm", "log_variance")  # the roles of what can be trained

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LINEAR = (nn.Linear, *_CONVS)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_KINDS: tuple[tuple[tuple[type[nn.Module], ...], str, LayerKind], ...] = (
    ((nn.Linear,), "weight", "linear"),
    (_CONVS, "weight", "conv"),
    (_TRANSPOSED, "weight", "transposed"),
    ((nn.Embedding,), "weight", "embedding"),
    ((nn.MultiheadAttention,), "in_proj_weight", "attention"),
)
_SOURCES = (*_LINEAR, *_TRANSPOSED, nn.RNNBase, nn.MultiheadAttention, nn.Embedding)  # whose output a norm may act on
_LOG_VARIANCES = {"log_variance": "weight", "bias_log_variance": "bias"}  # and the means they belong to


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight with its bias, and everything that lives off it.

    Attributes:
        name: the module's path.
        kind: "linear" or "conv"; "transposed" (a transposed convolution), "turned" (a linear layer whose weight
            is in × out, as GPT-2 has them), "embedding", "attention" (the packed projections of queries, keys and
            values), or "other" (a token, a recurrent layer, …).
        weight: the weight's name.
        bias: the bias's name, if there is one.
        followers: normalization parameters and statistics that act on this layer's output.
        log_variances: log-variances of its weight and bias, for a Bayesian layer.
        groups: into how many independent layers a grouped convolution falls.
    """

    name: str
    kind: LayerKind
    weight: str
    bias: str | None = None
    followers: tuple[str, ...] = ()
    log_variances: tuple[str, ...] = ()
    groups: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether each row of the weight makes one output: a linear layer or a convolution."""
        return self.kind in ("linear", "conv")

    def under(self, path: str) -> Layer:
        """The same layer of a network that is a part of a larger one, at this path."""
        is_network = self.is_plain and self.name == self.weight
        return Layer(
            path if is_network else f"{path}.{self.name}",
            self.kind,
            f"{path}.{self.weight}",
            None if self.bias is None else f"{path}.{self.bias}",
            tuple(f"{path}.{name}" for name in self.followers),
            tuple(f"{path}.{name}" for name in self.log_variances),
            self.groups,
        )

    def matrix(self, params: Params) -> Tensor:
        """The layer as one matrix [W | b], out × (in·kh·kw + 1): weight and bias never part."""
        weight = params[self.weight].mT if self.kind == "turned" else params[self.weight].flatten(1)
        return weight if self.bias is None else torch.cat([weight, params[self.bias][:, None]], 1)

    def split(self, matrix: Tensor, like: Params) -> dict[str, Tensor]:
        """The inverse of `matrix`, with the shapes and dtypes of `like`."""
        weight = like[self.weight]
        rows = matrix if self.bias is None else matrix[:, :-1]
        found = {self.weight: (rows.mT if self.kind == "turned" else rows).reshape(weight.shape).to(weight.dtype)}
        return found if self.bias is None else found | {self.bias: matrix[:, -1].to(like[self.bias].dtype)}


@dataclass(frozen=True)  # without slots: what is derived is kept in the object
class Layout:
    """The role of every tensor of a model, and its layers.

    Roles decide what aggregation may do: floating tensors are averaged, counters take the maximum,
    and a norm's tensors follow the layer they act on, whatever the order of the state dict. A log-variance holds the
    log-variances of a mean: parameters called `log_variance` and `bias_log_variance` next to `weight` and `bias`.

    Attributes:
        roles: what each tensor is for, by its name.
        layers: the weights, each with what lives off it.
        tied: sets of names that stand for one tensor, in the order of the state dict.
        frozen: parameters that their author does not train.

    Example:
        >>> layout = Layout.of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))
        >>> layout.roles["1.running_mean"], layout.roles["1.num_batches_tracked"]
        ('statistic', 'counter')
        >>> layout.layer_of("1.running_mean")
        '0'
    """

    roles: Mapping[str, Role]
    layers: tuple[Layer, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Read the layout off a module: roles by module type, followers by data flow.

        A module with an attribute `layout` of this type is taken at its word.
        """
        if isinstance(declared := getattr(module, "layout", None), cls):
            return declared
        roles: dict[str, Role] = {}
        owners: dict[str, nn.Module] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            for name, tensor in _own_tensors(part):
                full = f"{path}.{name}" if path else name
                roles[full] = _role(part, name, tensor)
                owners[full] = part
        paths = {id(part): path for path, part in module.named_modules()}
        source = _norm_sources(module)
        named = list(module.named_parameters(remove_duplicate=False))
        frozen = frozenset(name for name, p in named if not p.requires_grad)
        return cls(roles, tuple(_layers(roles, owners, paths, source)), _tied(named), frozen)

    @classmethod
    def guess(cls, params: Params) -> Layout:
        """Read a layout off names and shapes alone, for plain state dicts without a module.

        A norm is taken to follow the last weight before it; a module's layout is exact, so prefer `of`.
        """
        roles = {name: _guess_role(name, tensor, params) for name, tensor in params.items()}
        layers: list[Layer] = []
        for name, role in roles.items():
            parent = name.rpartition(".")[0]
            if role == "weight":
                plain = name.rpartition(".")[2] == "weight"
                kind: LayerKind = "other" if not plain else "conv" if params[name].ndim > 2 else "linear"
                bias = _bias_of(name) if roles.get(_bias_of(name)) == "bias" else None
                variances = _log_variances_at(parent, roles)
                layers.append(Layer((parent if plain else "") or name, kind, name, bias, log_variances=variances))
            elif layers and role not in ("bias", "log_variance"):
                layers[-1] = replace(layers[-1], followers=(*layers[-1].followers, name))
        return cls(roles, tuple(layers))

    def layer_of(self, name: str) -> str | None:
        """The layer a tensor belongs to or acts on, or None if it stands alone."""
        for layer in self.layers:
            if name in (layer.weight, layer.bias, *layer.followers, *layer.log_variances):
                return layer.name
        return None

    @cached_property
    def log_variances(self) -> Mapping[str, str]:
        """For every mean of a Bayesian layer the name of its log-variances."""
        return {_mean_of(name): name for name in self.with_role("log_variance")}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The parameters that are trained, in the order of the state dict, one name for each tensor.

        Example:
            >>> Layout.of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))).trainable
            ('0.weight', '0.bias', '1.weight', '1.bias')
        """
        again = {name for names in self.tied for name in names[1:]}
        return tuple(n for n in self.with_role(*PARAMETERS) if n not in self.frozen and n not in again)

    def under(self, path: str) -> Layout:
        """The layout of the same network as a part of a larger one, at this path.

        Example:
            >>> Layout.of(nn.Linear(2, 1)).under("net").roles
            {'net.weight': 'weight', 'net.bias': 'bias'}
        """
        roles = {f"{path}.{name}": role for name, role in self.roles.items()}
        tied = tuple(tuple(f"{path}.{name}" for name in names) for names in self.tied)
        layers = tuple(layer.under(path) for layer in self.layers)
        return Layout(roles, layers, tied, frozenset(f"{path}.{name}" for name in self.frozen))

    def with_role(self, *wanted: Role) -> tuple[str, ...]:
        """The names of all tensors with one of these roles."""
        return tuple(name for name, role in self.roles.items() if role in wanted)


def _own_tensors(part: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from part.named_parameters(recurse=False)
    hidden = part._non_persistent_buffers_set
    yield from ((n, b) for n, b in part.named_buffers(recurse=False) if n not in hidden)


def _role(part: nn.Module, name: str, tensor: Tensor) -> Role:
    if not tensor.is_floating_point():
        return "counter"
    if not isinstance(tensor, nn.Parameter):
        return "statistic"
    if _stands_beside(name, tensor, dict(part.named_parameters(recurse=False))):
        return "log_variance"
    if isinstance(part, _NORMS):
        return "norm"
    return "weight" if tensor.ndim > 1 else "bias"


def _stands_beside(name: str, tensor: Tensor, params: Params) -> bool:
    """Whether a tensor has the name and the shape of a mean's log-variances."""
    mean = None if _mean_of(name) == name else params.get(_mean_of(name))
    return mean is not None and mean.shape == tensor.shape


def _log_variances_at(path: str, roles: Mapping[str, Role]) -> tuple[str, ...]:
    """The log-variances a module holds."""
    names = (f"{path}.{leaf}" if path else leaf for leaf in _LOG_VARIANCES)
    return tuple(name for name in names if roles.get(name) == "log_variance")


def _mean_of(name: str) -> str:
    """The name of the mean that log-variances of this name belong to; any other name as it is."""
    parent, dot, leaf = name.rpartition(".")
    return f"{parent}{dot}{_LOG_VARIANCES.get(leaf, leaf)}"


def _guess_role(name: str, tensor: Tensor, params: Params) -> Role:
    leaf = name.rpartition(".")[2]
    if not tensor.is_floating_point():
        return "counter"
    if leaf.startswith("running_"):
        return "statistic"
    if _stands_beside(name, tensor, params):
        return "log_variance"
    if tensor.ndim > 1:
        return "weight"
    weight = name.removesuffix(leaf) + leaf.replace("bias", "weight")
    sibling = params.get(weight) if "bias" in leaf else None
    return "bias" if sibling is not None and sibling.ndim > 1 else "norm"


def _bias_of(weight: str) -> str:
    """The name a weight's bias would have: bias_ih_l0 for weight_ih_l0, in_proj_bias for in_proj_weight."""
    parent, dot, leaf = weight.rpartition(".")
    return f"{parent}{dot}{leaf.replace('weight', 'bias')}" if "weight" in leaf else ""


def _layers(
    roles: Mapping[str, Role],
    owners: Mapping[str, nn.Module],
    paths: Mapping[int, str],
    source: Mapping[str, str],
) -> Iterable[Layer]:
    followers: dict[str, list[str]] = {}
    for name, part in owners.items():
        if isinstance(part, _NORMS) and paths[id(part)] in source:
            followers.setdefault(source[paths[id(part)]], []).append(name)
    last_weights: dict[str, str] = {}
    for name, role in roles.items():
        if role == "weight":
            last_weights[name.rpartition(".")[0]] = name
    for name, role in roles.items():
        if role != "weight":
            continue
        part, path = owners[name], name.rpartition(".")[0]  # a shared module has one layer under each of its names
        leaf = name.rpartition(".")[2]
        kind = _kind(part, leaf)
        plain = kind in ("linear", "conv")
        last = last_weights.get(path) == name  # what acts on a module's output follows the last weight that makes it
        yield Layer(
            path if plain and path else name,
            kind,
            name,
            bias if roles.get(bias := _bias_of(name)) == "bias" else None,
            tuple(followers.get(path, ())) if last else (),
            _log_variances_at(path, roles),
            part.groups if isinstance(part, (*_CONVS, *_TRANSPOSED)) else 1,
        )


def _kind(part: nn.Module, leaf: str) -> LayerKind:
    for parts, weight, kind in _KINDS:
        if isinstance(part, parts) and leaf == weight:
            return kind
    # GPT-2's linear layer, which `transformers` calls Conv1D: x W + b with W in × out
    gpt2 = type(part).__name__ == "Conv1D" and type(part).__module__.startswith("transformers.")
    return "turned" if gpt2 and leaf == "weight" else "other"


def _tied(named: Iterable[tuple[str, nn.Parameter]]) -> tuple[tuple[str, ...], ...]:
    """The names that stand for one parameter, where there are several."""
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)


class _Tracer(torch.fx.Tracer):
    """Follows data from layer to layer; subclasses of layers and norms are one step, as torch's own are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (*_SOURCES, *_NORMS)) or super().is_leaf_module(m, module_qualified_name)


def _norm_sources(module: nn.Module) -> dict[str, str]:
    """Which linear or convolution layer each norm reads from: by tracing, else by registration order."""
    parts, found, last = dict(module.named_modules()), dict[str, str](), None
    for path, part in parts.items():
        if isinstance(part, _SOURCES):
            last = path  # an attention's output projection is registered right behind it
        elif isinstance(part, _NORMS) and last is not None:
            found[path] = last
    try:
        graph = _Tracer().trace(module)
    except Exception:  # tracing runs the user's own forward: whatever it raises, registration order remains
        return found
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(parts.get(str(node.target)), _NORMS):
            continue
        back = node
        while back.all_input_nodes:
            back = back.all_input_nodes[0]
            path = str(back.target)
            if back.op == "call_module" and isinstance(parts.get(path), _SOURCES):
                # the weight that makes an attention's output is that of its output projection
                found[str(node.target)] = f"{path}.out_proj" if isinstance(parts[path], nn.MultiheadAttention) else path
                break
    return found


def squared_distance(a: Params, b: Params) -> float:
    """‖a − b‖² over all floating tensors, in float64.

    Example:
        >>> squared_distance({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)})
        25.0
    """
    floats = [n for n in a if a[n].is_floating_point()]
    return float(sum(((a[n].double() - b[n].double()).square().sum() for n in floats), torch.zeros(())))
