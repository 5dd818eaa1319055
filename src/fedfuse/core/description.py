"""A network's layout as plain data, so that what was trained elsewhere can be fused without its code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from fedfuse.core.messages import Form
from fedfuse.core.params import Layer, LayerKind, Layout, Role
from fedfuse.errors import ConfigError

_ROLES: tuple[Role, ...] = get_args(Role)
_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)


def describe(layout: Layout) -> dict[str, Any]:
    """The layout as JSON: names by role, layers as tables, tied and frozen names where there are any.

    Example:
        >>> from torch import nn
        >>> describe(Layout.of(nn.Linear(2, 1)))["layers"]
        [{'name': 'weight', 'kind': 'linear', 'weight': 'weight', 'bias': 'bias'}]
    """
    roles = {role: list(names) for role in _ROLES if (names := layout.with_role(role))}
    plain: dict[str, Any] = {"roles": roles, "layers": [_describe_layer(layer) for layer in layout.layers]}
    plain |= {"tied": [list(names) for names in layout.tied]} if layout.tied else {}
    return plain | ({"frozen": sorted(layout.frozen)} if layout.frozen else {})


def _describe_layer(layer: Layer) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": layer.name, "kind": layer.kind, "weight": layer.weight, "bias": layer.bias}
    plain |= {"followers": list(layer.followers), "log_variances": list(layer.log_variances)}
    plain |= {"groups": layer.groups} if layer.groups > 1 else {}
    return {key: value for key, value in plain.items() if value}


def read_layout(data: object, forms: Mapping[str, Form]) -> Layout:
    """A layout that came with some tensors, in the tensors' order; it must speak of these and make sense of them.

    Raises:
        ConfigError: in the words of the first thing that cannot be.

    Example:
        >>> from torch import nn
        >>> net = nn.Linear(2, 1)
        >>> layout = Layout.of(net)
        >>> read_layout(describe(layout), {n: Form.of(t) for n, t in net.state_dict().items()}) == layout
        True
    """
    if not isinstance(data, dict) or not data.keys() <= {"roles", "layers", "tied", "frozen"}:
        raise ConfigError("a layout must be a table of roles, layers, tied and frozen names")
    roles = _read_roles(data.get("roles"), forms)
    layers = data.get("layers")
    if not isinstance(layers, list) or len(layers) > len(forms):
        raise ConfigError("a layout's layers must be a list of tables")
    tied = data.get("tied", [])
    if not isinstance(tied, list) or not all(isinstance(names, list) and len(names) > 1 for names in tied):
        raise ConfigError("a layout's tied names must be lists of two or more")
    for names in tied:
        _check_tied(names, roles, forms)
    frozen = _names(data.get("frozen", []), roles, "frozen")
    return Layout(
        roles, tuple(_read_layer(t, roles, forms) for t in layers), tuple(map(tuple, tied)), frozenset(frozen)
    )


def _read_roles(data: object, forms: Mapping[str, Form]) -> dict[str, Role]:
    if not isinstance(data, dict) or not data.keys() <= set(_ROLES):
        raise ConfigError(f"a layout's roles must be among {', '.join(_ROLES)}")
    declared: dict[str, Role] = {}
    for role in _ROLES:
        for name in _names(data.get(role, []), forms, role):
            declared[name] = role
    if missing := [name for name in forms if name not in declared]:
        raise ConfigError(f"a layout gives {missing[0]!r:.80} no role")
    for name, role in declared.items():
        if forms[name].dtype.is_floating_point == (role == "counter"):
            raise ConfigError(f"a layout calls {name!r:.80}, which is {forms[name].dtype}, a {role}")
    return {name: declared[name] for name in forms}


def _names(data: object, known: Mapping[str, Any], what: str) -> list[str]:
    if not isinstance(data, list) or not all(isinstance(name, str) and name in known for name in data):
        raise ConfigError(f"a layout's {what} must be names of tensors")
    return data


def _check_tied(names: list[Any], roles: Mapping[str, Role], forms: Mapping[str, Form]) -> None:
    if len({forms[name] for name in _names(names, roles, "tied")}) > 1:
        raise ConfigError(f"a layout ties {names[0]!r:.80} to a tensor of another form")


def _read_layer(data: object, roles: Mapping[str, Role], forms: Mapping[str, Form]) -> Layer:
    keys = {"name", "kind", "weight", "bias", "followers", "log_variances", "groups"}
    if not isinstance(data, dict) or not data.keys() <= keys or not isinstance(data.get("name"), str):
        raise ConfigError("a layout's layer must be a table with a name, a kind and a weight")
    weight, bias, groups = data.get("weight"), data.get("bias"), data.get("groups", 1)
    if data.get("kind") not in _KINDS or not isinstance(weight, str) or roles.get(weight) != "weight":
        raise ConfigError(f"a layout's layer {data['name']!r:.80} has no kind or weight that is known")
    shape = forms[weight].shape
    if len(shape) < 2 or type(groups) is not int or groups < 1 or shape[0] % groups:
        raise ConfigError(f"a layout's layer {data['name']!r:.80} cannot have {groups!r:.20} groups")
    outputs = shape[0] if data["kind"] not in ("turned", "transposed") else shape[1] * groups
    if bias is not None and (not isinstance(bias, str) or roles.get(bias) != "bias" or forms[bias].shape != (outputs,)):
        raise ConfigError(f"a layout's layer {data['name']!r:.80} has a bias that does not fit its weight")
    followers = _names(data.get("followers", []), roles, "followers")
    log_variances = _of_role(_names(data.get("log_variances", []), roles, "log_variances"), roles, ("log_variance",))
    return Layer(data["name"], data["kind"], weight, bias, tuple(followers), tuple(log_variances), groups)


def _of_role(names: Iterable[str], roles: Mapping[str, Role], wanted: tuple[Role, ...]) -> list[str]:
    if wrong := [name for name in names if roles[name] not in wanted]:
        raise ConfigError(f"a layout's {wrong[0]!r:.80} is a {roles[wrong[0]]}, expected a {' or '.join(wanted)}")
    return list(names)
