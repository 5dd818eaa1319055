"""A fused model for other programs: ONNX, TorchScript, or its weights, with a note of classes and inputs."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedfuse.core.about import About
from fedfuse.core.files import write_atomically
from fedfuse.core.forms import ArrayForm, PictureForm
from fedfuse.core.inputs import example_inputs, own_form, shape_read
from fedfuse.core.model import Model, Single
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, error_text
from fedfuse.models.bayes import Bayesian
from fedfuse.nets.combine import Choosing, Combine
from fedfuse.nets.mixture import Mixture
from fedfuse.nets.routes import Route
from fedfuse.wire.files import load_answering

Target = Literal["onnx", "torchscript", "state-dict"]
TARGETS: tuple[Target, ...] = get_args(Target)


class _Network(nn.Module):
    """A network that reads rows as they are laid out, and gives its logits."""

    def __init__(self, model: Single, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = model.spec.build()
        self.net.load_state_dict(dict(model.posterior.mean))
        read = shape_read(model.spec, shape)
        self.shape = None if read == shape else read

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.net(x if self.shape is None else x.reshape(-1, *self.shape))
        return logits


class _Together(nn.Module):
    """Networks that answer by a rule."""

    def __init__(self, members: list[nn.Module], weights: Tensor, combine: Combine) -> None:
        super().__init__()
        self.members, self.combine = nn.ModuleList(members), combine
        self.register_buffer("weights", weights.float())

    def forward(self, x: Tensor) -> Tensor:
        """The combined answer."""
        return self.combine(self.get_buffer("weights"), torch.stack([member(x) for member in self.members]))


class _NormalizeFirst(nn.Module):
    """A network behind the normalization that its rows had: (x − mean) / std."""

    def __init__(self, net: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], axes: int) -> None:
        super().__init__()
        view = (1, -1) + (1,) * (axes - 1)
        self.net = net
        self.register_buffer("mean", torch.tensor(mean).view(view))
        self.register_buffer("std", torch.tensor(std).view(view))

    def forward(self, x: Tensor) -> Tensor:
        """The network's answer to rows before normalization."""
        answer: Tensor = self.net((x - self.get_buffer("mean")) / self.get_buffer("std"))
        return answer


def export_model(path: Path, to: str, output: Path, trusted: Collection[str] = ()) -> list[Path]:
    """Write a model for another program; ONNX and TorchScript take rows before normalization, any number at once.

    Args:
        path: a model or an update.
        to: "onnx", "torchscript" or "state-dict".
        output: the file.
        trusted: networks of other packages that the file may name.

    Returns:
        The files: the model, and a note in JSON that names its classes and the form of its inputs.

    Raises:
        ConfigError: if it cannot be exported so, or what exports it is not installed.
    """
    if to not in TARGETS:
        raise ConfigError(f"a model cannot be exported to {to!r}, expected {', '.join(TARGETS)}")
    if output.resolve() == path.resolve():
        raise ConfigError(f"{output} is the model itself; write to another file")
    model, about = load_answering(path, trusted)
    if to == "state-dict":
        contents = save({name: t.contiguous().clone() for name, t in _one(model).posterior.mean.items()})
    else:
        module, x = _runnable(model, about, to)
        contents = (_onnx_bytes if to == "onnx" else _torchscript_bytes)(module, x)
    note = output.with_name(f"{output.name}.json")
    text = json.dumps(_note(about, to), indent=1, ensure_ascii=False) + "\n"
    for file, data in ((output, contents), (note, text.encode())):
        with write_atomically(file) as opened:
            opened.write(data)
    return [output, note]


def _note(about: About, to: str) -> dict[str, Any]:
    wanted = {"class_names", "inputs", "method", "sites", "federation", "versions"}
    told = {key: value for key, value in about.to_json().items() if key in wanted}
    return {"format": to, "output": "logits", "normalizes": to != "state-dict", **told}


def _one(model: Model) -> Single:
    if not isinstance(model, Single):
        raise ConfigError(f"{len(model.members)} networks are no state dict of one; export them to onnx or torchscript")
    return model


def _runnable(model: Model, about: About, to: str) -> tuple[nn.Module, Tensor]:
    """The model as one module from rows to logits, and two rows to try it with."""
    _refuse_what_draws(model, to)
    spec = model.members[0].spec
    shape = _shape(spec, about)
    networks: list[nn.Module] = [_Network(member, shape) for member in model.members]
    if isinstance(model, Single):
        module = networks[0]
    elif isinstance(model, Mixture) and not isinstance(model.combine, Route | Choosing):
        module = _Together(networks, model.weights, model.combine)
    else:
        raise ConfigError(
            f"networks that stay apart, or of which each row chooses some, cannot be exported to {to} as one; "
            "fuse the updates by a method that gives one network, or by `ensemble`"
        )
    if isinstance(about.inputs, PictureForm | ArrayForm) and about.inputs.is_normalized:
        module = _NormalizeFirst(module, about.inputs.mean, about.inputs.std, len(shape))
    return module.eval(), example_inputs(spec, shape, 2).reshape(2, *shape)


def _refuse_what_draws(model: Model, to: str) -> None:
    for member in model.members:
        if isinstance(network := member.spec.skeleton(), Bayesian) and network.noise:
            raise ConfigError(f"a Bayesian network draws while it answers, which {to} cannot keep; use state-dict")


def _shape(spec: Spec, about: About) -> tuple[int, ...]:
    form = about.inputs if about.inputs is not None else own_form(spec)
    if form is None:
        raise ConfigError(f"nobody says what the inputs of {spec.factory!r} look like; use a file that fedfuse made")
    return tuple(form.shape)


def _torchscript_bytes(module: nn.Module, x: Tensor) -> bytes:
    more, file = torch.cat([x, x, x[:1]]), io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # that tracing is old, and that shapes are fixed, which is looked at below
            traced = torch.jit.trace(module, x)
            same = torch.allclose(traced(more), module(more), rtol=1e-4, atol=1e-5)
            torch.jit.save(traced, file)
    except RuntimeError as why:
        raise ConfigError(f"this network cannot be exported to torchscript: {error_text(why)}; try onnx") from why
    if not same:
        raise ConfigError("the traced network answers otherwise for another number of rows; export it to onnx")
    return file.getvalue()


def _onnx_bytes(module: nn.Module, x: Tensor) -> bytes:
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"export to ONNX needs {' and '.join(missing)}; install fedfuse[export]")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            program = torch.onnx.export(
                module,
                (x,),
                input_names=["rows"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
                dynamo=True,
                verbose=False,
            )
        assert program is not None, "the exporter returns what it made where no file is named"
        contents: bytes = program.model_proto.SerializeToString()
    except Exception as why:  # the exporter raises whatever it meets in a network
        raise ConfigError(f"this network cannot be exported to ONNX: {error_text(why)}; try torchscript") from why
    return contents
