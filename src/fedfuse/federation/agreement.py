"""The federation folder: what all sites agree on before any trains, as one readable file and the common start.

`create` and `moments` find out what is agreed on; here it is written, scaled and read back.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from fedfuse.api.update import check_supported, prepared_start, start_of
from fedfuse.core.files import regular, write_atomically
from fedfuse.core.inputs import RowForm, TableForm, TextForm, run_once
from fedfuse.core.metadata import About, ClassName, check_class_names, names_text, versions
from fedfuse.core.params import Params
from fedfuse.core.rng import seeded
from fedfuse.core.settings import Settings, validate_settings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.config import LocalConfig, MethodConfig, NameWithOptions, assign, to_toml
from fedfuse.experiment.prepare import spec_with
from fedfuse.tasks import LanguageModel, Task, task_header, task_named
from fedfuse.wire.codec import fingerprint
from fedfuse.wire.files import save_model

FILE, START = "federation.toml", "w0.safetensors"
TEXT_NETWORKS = {"text-classification": "text_classifier", "language-model": "transformer"}
"""Those of ours that read texts, by task."""
_OUTPUT_COUNTS = {
    "classification": (2, 1 << 20),
    "binary": (2, 2),
    "multilabel": (1, 1 << 20),
    "regression": (1, 1 << 20),
    "text-classification": (2, 1 << 20),
    "language-model": (2, 1 << 20),
}
_WITH_CLASSES = ("classification", "binary", "text-classification")
_HEADER = f"""# What the sites of this federation agree on. Send the whole folder to every site, which then runs
#   fedfuse update --federation THIS-FOLDER --data ./own-rows -o own-name.safetensors
# {START} holds the weights everybody begins with.

"""


class Agreement(Settings):
    """What `federation.toml` says.

    Attributes:
        format: of this file.
        name: what to call the federation.
        start: a short name of the common start, so that a site notices a wrong one.
        seed: of every random draw at sites.
        least_rows: a site with fewer rows brings nothing.
        all_examples: how many examples all sites hold together, if that is known.
        task: what is to be learned.
        classes: the name of each class, in the order of the network's outputs; none for a table's labels or numbers,
            which its targets name, and for a language model, whose tokens the characters name.
        model: the network and its options.
        inputs: the form in which rows are given to it.
        method: how updates will be fused, which decides what sites bring.
        local: how sites train.
    """

    format: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=200)] = "federation"
    start: str = ""
    seed: int = 0
    least_rows: PositiveInt = 10
    all_examples: PositiveInt | None = None
    task: Literal["classification", "binary", "multilabel", "regression", "text-classification", "language-model"] = (
        "classification"
    )
    classes: tuple[ClassName, ...] = ()
    model: NameWithOptions
    inputs: RowForm
    method: MethodConfig = MethodConfig(name="fedavg")
    local: LocalConfig = LocalConfig()

    @field_validator("inputs", mode="before")
    @classmethod
    def _read_kind(cls, given: Any) -> Any:
        return {"kind": "pictures", **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_class_names(self.output_names)
        if isinstance(self.inputs, TableForm):
            _check_targets(self.inputs, self.task, self.classes)
        _check_texts(self.inputs, self.task, self.classes)
        least, most = _OUTPUT_COUNTS[self.task]
        count, words = len(self.output_names), "classes" if self.task in _WITH_CLASSES else "targets"
        if not least <= count <= most:
            wanted = "two" if least == most else "two or more" if least == 2 else "one or more"
            raise ValueError(f"there is {names_text(self.output_names) or 'none'}, expected {wanted} {words}")
        return self

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of classes, or else of a table's labels or numbers, or of a language model's tokens."""
        if self.classes or not isinstance(self.inputs, TableForm | TextForm):
            return self.classes
        return self.inputs.target_names if isinstance(self.inputs, TableForm) else self.inputs.token_names

    @property
    def awaits_moments(self) -> bool:
        """Whether its columns have no common scale yet."""
        return isinstance(self.inputs, TableForm) and self.inputs.scale == "awaited"

    @property
    def learns(self) -> Task:
        """The task itself."""
        return task_named(self.task)

    @property
    def spec(self) -> Spec:
        """The network, with what task, classes and inputs decide filled in."""
        tokens = self.inputs.tokens if isinstance(self.inputs, TextForm) else 0
        return spec_with(self.model, self.inputs.shape, self.learns.outputs(len(self.output_names)), tokens)

    def first_weights(self) -> Params:
        """The start that the seed draws."""
        with seeded(self.seed, "start"):
            return dict(self.spec.build().state_dict())

    def check_network(self) -> None:
        """Refuse a network that cannot read these inputs or does not give the outputs that the task has.

        Raises:
            ConfigError: with what it gives instead.
        """
        logits, wanted = run_once(self.spec, self.inputs.shape), self.learns.outputs(len(self.output_names))
        by_position = isinstance(self.learns, LanguageModel)
        if isinstance(self.inputs, TextForm) and (logits.ndim == 3) != by_position:
            raise ConfigError(
                f"model {self.model.name!r} answers {'once for a text' if by_position else 'at every character'}, and "
                f"the task {self.task} needs {'an answer at every character' if by_position else 'one for a text'}; "
                f"take {TEXT_NETWORKS[self.task]}, or a network of yours"
            )
        if logits.shape[-1] != wanted:
            why = "one per class; let its classes be as many as the federation's"
            raise ConfigError(
                f"model {self.model.name!r} gives {logits.shape[-1]} outputs, expected {wanted}, "
                + (why if self.task == "classification" else f"as the task {self.task} has")
            )

    def to_toml(self) -> str:
        """The text of `federation.toml`."""
        plain = self.model_dump(mode="json", exclude_none=True, exclude={"local": {"device", "kernel"}})
        if not self.classes:
            del plain["classes"]
        kind = plain["inputs"].pop("kind")
        plain["inputs"] = {"kind": kind, **{key: value for key, value in plain["inputs"].items() if value != []}}
        for column in (*plain["inputs"].get("columns", ()), *plain["inputs"].get("targets", ())):
            for key in [key for key, value in column.items() if value in ("", False)]:
                del column[key]
        return _HEADER + to_toml(plain)


def _check_targets(form: TableForm, task: str, classes: Sequence[str]) -> None:
    """Refuse a table whose targets are not those of the task."""
    if not form.targets:
        raise ValueError("the table has no target; say which column is to be predicted (--target)")
    if task in ("classification", "binary"):
        if len(form.targets) != 1:
            raise ValueError(f"{task} has one target column, and {len(form.targets)} came")
        if not classes:
            raise ValueError(f"the classes of {form.targets[0].name!r} are not named; name them (--classes)")
    elif classes:
        raise ValueError(f"{task} has targets and no classes; leave classes out")


def _check_texts(form: RowForm, task: str, classes: Sequence[str]) -> None:
    """Refuse texts for a task of other rows, other rows for a task of texts, and classes of a language model."""
    if isinstance(form, TextForm) != (task in TEXT_NETWORKS):
        raise ValueError(f"{task} cannot read {form}; texts are for {' and '.join(TEXT_NETWORKS)}")
    if task == "language-model" and classes:
        raise ValueError("a language model tells characters and no classes; leave classes out")
    if task == "text-classification" and not classes:
        raise ValueError("the classes of texts are not named; name them (--classes)")


@dataclass(frozen=True, slots=True)
class FederationFolder:
    """A federation folder that was read and found agreement."""

    folder: Path
    agreement: Agreement

    @property
    def start(self) -> Path:
        """The file of the common start."""
        return self.folder / START


def write_federation(folder: Path, agreement: Agreement, start: Params | None = None) -> FederationFolder:
    """Make the folder: the agreement, and the common start, drawn by its seed if none is given.

    The start is of the network that the method makes of the agreed one: sites begin at it, and files are held to it.

    Raises:
        ConfigError: if there is one already, or network, start, classes and inputs do not fit each other.
    """
    if (folder / FILE).exists():
        raise ConfigError(f"{folder} holds a federation already; choose another folder, for sites may use this one")
    return _write(folder, agreement, start)


def scale_federation(federation: FederationFolder, form: TableForm) -> FederationFolder:
    """Give a table's folder its common scale: the agreement, and a start for the features that follow from it.

    Raises:
        ConfigError: if it has a scale already, by which sites may have trained.
    """
    agreed = federation.agreement
    if not agreed.awaits_moments:
        raise ConfigError(f"{federation.folder} does not wait for moments; make a new folder with `fedfuse init`")
    return _write(federation.folder, agreed.model_copy(update={"inputs": form}), None)


def _write(folder: Path, agreement: Agreement, start: Params | None) -> FederationFolder:
    recipe = agreement.method.recipe()
    check_supported(recipe, "a federation of files")
    if recipe.result == "apart":
        raise RecipeError(
            f"method {recipe.name!r} leaves every site its own network, so there is nothing to fuse; let sites run "
            "`fedfuse update` and `fedfuse evaluate` without a federation, or use ensemble, which keeps all networks"
        )
    recipe.check_task(agreement.learns)
    agreement.check_network()
    weights = agreement.first_weights() if start is None else dict(start)
    names, inputs = agreement.output_names, agreement.inputs.bounds()
    bench = Bench(classes=len(names), seed=agreement.seed, task=agreement.learns, inputs=inputs)
    recipe.check_inputs(bench)
    first = prepared_start(recipe, agreement.spec, weights, bench)
    recipe.check_networks(1, bench, ServerState(0, first))
    agreement = agreement.model_copy(update={"start": fingerprint(first.posterior.mean)})
    about = About(
        federation=agreement.name,
        task=task_header(agreement.learns).get("task", ""),
        class_names=agreement.output_names,
        inputs=agreement.inputs,
        start=agreement.start,
        versions=versions(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_model(first, folder / START, about=about)
    with write_atomically(folder / FILE) as file:
        file.write(agreement.to_toml().encode())
    return FederationFolder(folder, agreement)


def read_federation(folder: Path, sets: Sequence[str] = (), trusted: Collection[str] = ()) -> FederationFolder:
    """Read a federation folder.

    Args:
        folder: with `federation.toml` and the start.
        sets: what this site changes of its training, as `local.key=value`.
        trusted: networks of other packages that the folder may name, as package.module:Class.

    Raises:
        ConfigError: if a file is missing, says something that cannot be, or is not the one that belongs here.
    """
    path = folder / FILE if folder.is_dir() else folder
    values = _read_toml(path)
    for text in sets:
        if not text.startswith("local."):
            raise ConfigError(
                f"--set {text!r}: a site of a federation changes how it trains (local.…) and nothing else"
            )
        assign(values, text)
    agreement = validate_settings(Agreement, values)
    if ":" in agreement.model.name and agreement.model.name not in trusted:
        raise ConfigError(
            f"the federation's network {agreement.model.name!r} is not one of fedfuse's; "
            f"name it yourself (--model {agreement.model.name}) if you have its code and trust it"
        )
    agreement.method.recipe()
    federation = FederationFolder(path.parent, agreement)
    if not federation.start.is_file():
        raise ConfigError(f"{federation.folder} has no {START}, the common start; ask for the whole folder again")
    if fingerprint(start_of(federation.start)[1]) != agreement.start:
        raise ConfigError(
            f"{federation.start} holds other weights than {FILE} speaks of, so updates from it could not be fused with "
            "the others'; ask for the whole folder again"
        )
    return federation


def _read_toml(path: Path) -> dict[str, Any]:
    """The values of a federation file."""
    try:
        return tomllib.loads(regular(path).read_text(encoding="utf-8"))
    except OSError as why:
        raise ConfigError(
            f"cannot read {path}: {why.strerror or why}; name the folder that `fedfuse init` made, with {FILE} inside"
        ) from why
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise ConfigError(f"{path} is not a TOML file: {why}; ask for the federation folder again") from why
