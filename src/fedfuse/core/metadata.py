"""What a file says of itself: which classes, which inputs, who learnt on how much, and how; read with care."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from fedfuse.core.inputs import ArrayForm, RowForm
from fedfuse.core.messages import Form
from fedfuse.core.params import Layer, LayerKind, Layout, Role
from fedfuse.core.settings import Settings, validate_settings
from fedfuse.errors import ConfigError

Word = Annotated[str, Field(max_length=1000)]
ClassName = Annotated[str, Field(min_length=1, max_length=200)]


class Contribution(Settings):
    """A site of which something is in a fused model.

    Attributes:
        client: its name.
        num_examples: how many examples it said stand behind its update.
        counted: for how many it counted, where that is another number: weakened at the door, or vouched for.
        file: where its update lay, where the file's name is another one than the site's.

    Example:
        >>> Contribution(client="north", num_examples=400, counted=120).model_dump()
        {'client': 'north', 'num_examples': 400.0, 'counted': 120.0}
    """

    client: Word
    num_examples: NonNegativeFloat
    counted: NonNegativeFloat | None = None
    file: Word = ""

    @model_serializer(mode="wrap")
    def _leave_out_what_is_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in plain(self).items() if value not in (None, "")}


class About(BaseModel):
    """What the header of an update or of a model tells a reader.

    Attributes:
        client: the site, of an update.
        method: which method made it.
        federation: the name of the federation file it was made by, if any.
        task: what is to be learned; where nothing stands, classification.
        class_names: the name of each output, in order; none in files that know only how many there are.
        inputs: the form of its rows.
        num_examples: how many examples stand behind an update.
        steps: local optimizer steps of an update.
        training: how it was trained.
        start: a short name of the weights it began with.
        reveals: what left the site in addition to the weights.
        sites: who is in a fused model.
        refused: who is not, and why.
        versions: of what wrote it.

    Example:
        >>> About.of({"kind": "reply", "client": "north", "class_names": ["ill", "well"]}).class_names
        ('ill', 'well')
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    client: Word = ""
    method: Word = ""
    federation: Word = ""
    task: Word = ""
    class_names: tuple[ClassName, ...] = ()
    inputs: RowForm | None = None
    num_examples: NonNegativeFloat | None = None
    steps: Annotated[int, Field(ge=0)] | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    start: Word = ""
    reveals: tuple[Word, ...] = ()
    sites: tuple[Contribution, ...] = ()
    refused: tuple[dict[str, Word], ...] = ()
    versions: dict[str, Word] = Field(default_factory=dict)

    @field_validator("class_names")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        check_class_names(names)
        return names

    @field_validator("inputs", mode="before")
    @classmethod
    def _read_shape(cls, given: Any) -> Any:
        """Files used to tell the shape and nothing else."""
        return ArrayForm(shape=tuple(given)) if isinstance(given, list) and given else given or None

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> About:
        """What a header tells; what it does not mention is left empty.

        Raises:
            ConfigError: in the words of the first entry that cannot be.
        """
        return validate_settings(cls, {key: header[key] for key in cls.model_fields if key in header})

    def to_json(self) -> dict[str, Any]:
        """Plain data for a header: only what there is to tell."""
        return {key: value for key, value in self.model_dump(mode="json").items() if value not in (None, "", [], {})}


def check_class_names(names: Sequence[str]) -> None:
    """Refuse names that could not tell classes apart.

    Example:
        >>> check_class_names(["ill", "ill"])
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: the class 'ill' stands there twice; each class needs a name of its own
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the class {twice[0]!r} stands there twice; each class needs a name of its own")
    if odd := [name for name in names if not name.isprintable() or name != name.strip() or not name]:
        raise ConfigError(f"{odd[0]!r} is no name of a class; use printable letters without blanks at the ends")


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names that tell classes apart, where a public set calls two of them by one word.

    Example:
        >>> distinct_names(["crane", "egret", "crane"])
        ('crane', 'egret', 'crane (2)')
    """
    places = [names[: k + 1].count(name) for k, name in enumerate(names)]
    return tuple(name if place == 1 else f"{name} ({place})" for name, place in zip(names, places, strict=True))


def versions() -> dict[str, str]:
    """Of what computes here.

    Example:
        >>> sorted(versions())
        ['fedfuse', 'python', 'torch']
    """
    found = {name: metadata.version(name) for name in ("fedfuse", "torch")}
    return {**found, "python": platform.python_version()}


def names_text(names: Sequence[str], most: int = 12) -> str:
    """Class names in a sentence.

    Example:
        >>> names_text(["ill", "well"]), names_text(["a", "b", "c"], most=2)
        ('ill, well', 'a, b, … (3 in all)')
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"


_ROLES: tuple[Role, ...] = get_args(Role)
_LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)


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
        if len({forms[name] for name in _names(names, roles, "tied")}) > 1:
            raise ConfigError(f"a layout ties {names[0]!r:.80} to a tensor of another form")
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


def _read_layer(data: object, roles: Mapping[str, Role], forms: Mapping[str, Form]) -> Layer:
    keys = {"name", "kind", "weight", "bias", "followers", "log_variances", "groups"}
    if not isinstance(data, dict) or not data.keys() <= keys or not isinstance(data.get("name"), str):
        raise ConfigError("a layout's layer must be a table with a name, a kind and a weight")
    weight, bias, groups = data.get("weight"), data.get("bias"), data.get("groups", 1)
    if data.get("kind") not in _LAYER_KINDS or not isinstance(weight, str) or roles.get(weight) != "weight":
        raise ConfigError(f"a layout's layer {data['name']!r:.80} has no kind or weight that is known")
    shape = forms[weight].shape
    if len(shape) < 2 or type(groups) is not int or groups < 1 or shape[0] % groups:
        raise ConfigError(f"a layout's layer {data['name']!r:.80} cannot have {groups!r:.20} groups")
    outputs = shape[0] if data["kind"] not in ("turned", "transposed") else shape[1] * groups
    if bias is not None and (not isinstance(bias, str) or roles.get(bias) != "bias" or forms[bias].shape != (outputs,)):
        raise ConfigError(f"a layout's layer {data['name']!r:.80} has a bias that does not fit its weight")
    followers = _names(data.get("followers", []), roles, "followers")
    log_variances = _names(data.get("log_variances", []), roles, "log_variances")
    if wrong := [name for name in log_variances if roles[name] != "log_variance"]:
        raise ConfigError(f"a layout's {wrong[0]!r:.80} is a {roles[wrong[0]]}, expected a log_variance")
    return Layer(data["name"], data["kind"], weight, bias, tuple(followers), tuple(log_variances), groups)
