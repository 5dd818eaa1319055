"""A fused model for other programs: ONNX, TorchScript, or its weights, with a note of classes and inputs."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import warnings
from collections.abc import Collection, Mapping
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedfuse.core.files import check_output, write_atomically
from fedfuse.core.inputs import (
    ArrayForm,
    CategoricalColumn,
    NumericColumn,
    PictureForm,
    RowForm,
    TableForm,
    TextForm,
    example_inputs,
    own_form,
    shape_read,
)
from fedfuse.core.metadata import About
from fedfuse.core.model import Model, Single
from fedfuse.core.torch_utils import answer_in_full, in_full
from fedfuse.data.rows import in_units
from fedfuse.data.tables import MISSING, level_name
from fedfuse.errors import ConfigError, error_text
from fedfuse.federation.predict import answers_of
from fedfuse.models.bayes import Bayesian
from fedfuse.nets.forward import Route
from fedfuse.nets.mixture import Choosing, Combine, Mixture
from fedfuse.tasks import CLASSIFICATION, LanguageModel, Regression, Task, task_named
from fedfuse.wire.files import load_answering

Target = Literal["onnx", "torchscript", "state-dict"]
TARGETS: tuple[Target, ...] = get_args(Target)
_NUMBER, _MARK = -1, -2  # features that are no category: a number, and a mark of what is missing


def export_model(path: Path, to: str, output: Path, trusted: Collection[str] = ()) -> list[Path]:
    """Write a model for another program; ONNX and TorchScript take raw rows, any number at once.

    ONNX takes a table's columns by name, numbers in their units and categories in words, and gives the probabilities or
    numbers of `predict` as well as the logits. TorchScript takes a table as one array. Pictures come in the size of the
    model and texts as the places of their characters, as the note says.

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
    note_file = output.with_name(f"{output.name}.json")
    for file in (output, note_file):
        check_output(file, [path])
    model, about = load_answering(path, trusted)
    note = _note(about, to)
    if to == "state-dict":
        if not isinstance(model, Single):
            raise ConfigError(
                f"{len(model.members)} networks are no state dict of one; export them to onnx or torchscript"
            )
        contents = save({name: t.contiguous().clone() for name, t in model.posterior.mean.items()})
    else:
        module, rows = _runnable(model, about, to)
        contents = _torchscript_bytes(module, rows) if to == "torchscript" else _onnx_bytes(module, rows, about, note)
    text = json.dumps(note, indent=1, ensure_ascii=False) + "\n"
    for file, data in ((output, contents), (note_file, text.encode())):
        with write_atomically(file) as opened:
            opened.write(data)
    return [output, note_file]


def _note(about: About, to: str) -> dict[str, Any]:
    """What a reader of the file must know, and nothing that the graph does not do."""
    wanted = {"class_names", "inputs", "method", "sites", "federation", "versions"}
    form, task, runs = about.inputs, _task(about), to != "state-dict"
    reads_table = isinstance(form, TableForm)
    note: dict[str, Any] = {
        "format": to,
        "normalizes": runs and form is not None and (reads_table or form.is_normalized),
    }
    note |= {} if task is None else {"task": task.name}
    note |= {"reads": _read(form, to), "gives": _asked(about, to)} if runs else {}
    if isinstance(form, TableForm):
        note["columns"] = [column.name for column in form.columns]
        note["units"] = {c.name: c.unit for c in form.columns if isinstance(c, NumericColumn) and c.unit}
    if reads_table and runs:
        note["cannot_read"] = "a category that is not known and a number that is not finite; the row's answer is NaN"
    return note | {key: value for key, value in about.to_json().items() if key in wanted}


def _read(form: RowForm | None, to: str) -> dict[str, str]:
    """The inputs by name, each with what is to be given."""
    if isinstance(form, TableForm) and to == "onnx":
        return {
            column.name: f"float64, n × 1{f', in {column.unit}' if column.unit else ''}; NaN where it is missing"
            if isinstance(column, NumericColumn)
            else f"text, n × 1: {', '.join(column.levels)}; empty where it is missing"
            for column in form.columns
        }
    size = "" if form is None else " × ".join(["n", *map(str, form.shape)])
    if isinstance(form, TableForm):
        size = f"n × {len(form.columns)}"
        how = "float64, a column of `inputs` each, in their order and units; a category by its place, NaN if missing"
    elif isinstance(form, PictureForm):
        how = "float32, pictures of this size and no other, channels first, their bytes divided by 255"
    elif isinstance(form, TextForm):
        how = "int64, a character's place in `characters` of `inputs`, from 1; 0 behind the end and for unknown ones"
    else:
        how = "numbers before normalization" if form is not None and form.is_normalized else "as the network reads them"
    return {"rows": f"{size}: {how}" if size else how}


def _asked(about: About, to: str) -> dict[str, str]:
    """The outputs by name, each with what it is."""
    task, where = _task(about), "at every character, " if about.task == LanguageModel.name else ""
    if isinstance(task, Regression):
        units = [t.unit for t in about.inputs.targets] if isinstance(about.inputs, TableForm) else []
        told = [f"{name} [{unit}]" if unit else name for name, unit in zip_longest(about.class_names, units)]
        return {"numbers": ", ".join(told) or "as the network gives them"}
    logits = {"logits": f"{where}before they become probabilities"}
    if task is None or to == "torchscript":
        return logits
    return logits | {"probabilities": f"{where}one for each of class_names, as `fedfuse predict` gives them"}


def _task(about: About) -> Task | None:
    """What the outputs mean, if the file says so: one with names of classes alone is for classification."""
    told = about.task or (CLASSIFICATION.name if about.class_names else "")
    return in_units(task_named(told), about.inputs) if told else None


def _runnable(model: Model, about: About, to: str) -> tuple[nn.Module, Tensor]:
    """The model as one module from rows to answers, and two rows to try it with."""
    for member in model.members:
        if isinstance(network := member.spec.skeleton(), Bayesian) and network.noise:
            raise ConfigError(f"a Bayesian network draws while it answers, which {to} cannot keep; use state-dict")
    spec, form = model.members[0].spec, about.inputs
    if (laid_out := form if form is not None else own_form(spec)) is None:
        raise ConfigError(f"nobody says what the inputs of {spec.factory!r} look like; use a file that fedfuse made")
    shape = tuple(laid_out.shape)
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
    rows = in_full(example_inputs(spec, shape, 2)).reshape(2, *shape)
    if isinstance(form, TableForm):
        module = _ReadTableFirst(module, form)
        rows = torch.stack([module.get_buffer("fill"), torch.full((len(form.columns),), torch.nan).double()])
    elif isinstance(form, PictureForm | ArrayForm) and form.is_normalized:
        module = _NormalizeFirst(module, form.mean, form.std, len(shape))
    task, names = _task(about), about.class_names
    try:
        with torch.no_grad():
            count = module.eval()(rows).shape[-1]
    except (RuntimeError, IndexError) as why:
        raise ConfigError(f"the network cannot read its file's form of rows, {form}: {error_text(why)}") from why
    if task is not None and names and count < task.outputs(len(names)):
        raise ConfigError(f"the file names {len(names)} classes and its network has {count} outputs; fuse it again")
    return _Answers(module, task, len(names), tuple(_asked(about, to))).eval(), rows


class _Network(nn.Module):
    """A network that reads rows as they are laid out, and gives its logits, a column each."""

    def __init__(self, model: Single, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net = model.spec.build()
        self.net.load_state_dict(dict(model.posterior.mean))
        read = shape_read(model.spec, shape)
        self.shape = None if read == shape else read

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits = answer_in_full(self.net, x if self.shape is None else x.reshape(-1, *self.shape))
        return logits if logits.ndim > 1 else logits[:, None]


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


class _ReadTableFirst(nn.Module):
    """A network behind what `encode_table` does to its rows, for all columns at once and in its precision.

    A row has one number for each column: a category's is its place among those of its column, NaN stands for what is
    missing. `encode_table` refuses what is no number or no category known; such a row's answer is NaN here.
    """

    def __init__(self, net: nn.Module, form: TableForm) -> None:
        super().__init__()
        self.net = net
        columns: dict[str, list[float]] = {key: [] for key in ("mean", "std", "fill", "least", "most", "is_number")}
        features = list[tuple[int, int]]()  # of which column, and of which category; or a number, or a mark
        for place, column in enumerate(form.columns):
            if isinstance(column, NumericColumn):
                most = torch.finfo(torch.float64).max
                own = (column.mean, column.std, column.mean, -most, most, True)
                features.append((place, _NUMBER))
            else:
                common = column.levels.index(column.mode or column.levels[0])
                own = (0.0, 1.0, common, 0.0, len(column.levels) - 1, False)
                features += [(place, level) for level in range(1, len(column.levels))]
            features += [(place, _MARK)] if column.indicator else []
            for key, value in zip(columns, own, strict=True):
                columns[key].append(value)
        for key, values in columns.items():
            self.register_buffer(key, torch.tensor(values, dtype=torch.bool if key == "is_number" else torch.float64))
        self.register_buffer("column", torch.tensor([column for column, _ in features]))
        self.register_buffer("kind", torch.tensor([kind for _, kind in features]))

    def forward(self, rows: Tensor) -> Tensor:
        """The network's answer to a table's rows."""
        get, absent = self.get_buffer, rows.isnan()
        within = (rows >= get("least")) & (rows <= get("most")) & (get("is_number") | (rows == rows.round()))
        scaled = (torch.where(absent, get("fill"), rows) - get("mean")) / get("std")
        kind, of, missing = get("kind"), scaled[:, get("column")], absent[:, get("column")]
        marked = ((kind == _MARK) & missing) | ((kind >= 0) & (of == kind))  # onnxruntime selects no booleans
        answer: Tensor = self.net(torch.where(kind == _NUMBER, of, marked.double()).float())
        known = (absent | within).all(1).view(-1, *(1,) * (answer.ndim - 1))
        return torch.where(known, answer, torch.nan)


class _Answers(nn.Module):
    """What is asked of a network: its logits without those of no class, and what `predict` makes of them."""

    def __init__(self, net: nn.Module, task: Task | None, classes: int, asked: tuple[str, ...]) -> None:
        super().__init__()
        self.net, self.task, self.asked = net, task, asked
        self.count = task.outputs(classes) if task is not None and classes else None

    def forward(self, rows: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One answer, or several."""
        logits = self.net(rows)[..., : self.count]
        found = tuple(logits if n == "logits" or not self.task else answers_of(logits, self.task) for n in self.asked)
        return found if len(found) > 1 else found[0]


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


def _onnx_bytes(module: nn.Module, rows: Tensor, about: About, note: Mapping[str, Any]) -> bytes:
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"export to ONNX needs {' and '.join(missing)}; install fedfuse[export]")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            program = torch.onnx.export(
                module,
                (rows,),
                input_names=["rows"],
                output_names=list(note["gives"]),
                dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
                dynamo=True,
                verbose=False,
            )
        assert program is not None, "the exporter returns what it made where no file is named"
        graph = program.model_proto
    except Exception as why:  # the exporter raises whatever it meets in a network
        raise ConfigError(f"this network cannot be exported to ONNX: {error_text(why)}; try torchscript") from why
    if isinstance(about.inputs, TableForm):
        graph = _with_columns(graph, about.inputs)
    for key, value in note.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        graph.metadata_props.add(key=key, value=text)
    contents: bytes = graph.SerializeToString()
    return contents


def _with_columns(model: Any, form: TableForm) -> Any:
    """A graph that reads a table's columns by name, numbers and words, where it read rows of numbers."""
    from onnx import TensorProto, compose, helper

    own = "fedfuse:"
    while any(column.name.startswith(own) for column in form.columns):
        own += ":"  # names within the graph that no column has
    outputs = [output.name for output in model.graph.output]
    if taken := [column.name for column in form.columns if column.name in outputs]:
        raise ConfigError(f"an output of the graph is called {taken[0]!r} as a column is; export it to torchscript")
    model = compose.add_prefix(model, own, rename_outputs=False)
    inputs, nodes, numbers = [], [], []
    for column in form.columns:
        words = isinstance(column, CategoricalColumn)
        kind = TensorProto.STRING if words else TensorProto.DOUBLE
        inputs.append(helper.make_tensor_value_info(column.name, kind, ["n", 1]))
        numbers.append(f"{own}place {column.name}" if words else column.name)
        if isinstance(column, CategoricalColumn):
            known, place = _spellings(column), f"{own}float {column.name}"
            nodes.append(
                helper.make_node(
                    "LabelEncoder",
                    [column.name],
                    [place],
                    domain="ai.onnx.ml",
                    keys_strings=list(known),
                    values_floats=list(known.values()),
                    default_float=-1.0,
                )
            )
            nodes.append(helper.make_node("Cast", [place], [numbers[-1]], to=TensorProto.DOUBLE))
    nodes.append(helper.make_node("Concat", numbers, [model.graph.input[0].name], axis=1))
    nodes += model.graph.node
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend(nodes)
    model.graph.input.extend(inputs)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
    return model


def _spellings(column: CategoricalColumn) -> dict[str, float]:
    """Every word that a table's reader takes for a category, 1.0 for 1 too, with its place; NaN for what is missing."""
    levels = enumerate(column.levels)
    known = {word: float(n) for n, level in levels for word in (level, f"{level}.0") if level_name(word) == level}
    missing = ("".join(letters) for word in MISSING for letters in product(*({c, c.upper()} for c in word)))
    return known | dict.fromkeys(sorted(missing), math.nan)
