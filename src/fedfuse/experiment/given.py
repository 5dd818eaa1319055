"""A network and data that a program gives a run as objects, in the place of names in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedfuse.core.spec import Spec
from fedfuse.data import Dataset, load
from fedfuse.data.sources import load_arrays
from fedfuse.errors import ConfigError

Data: TypeAlias = "Dataset | Sequence[Any]"


@dataclass(frozen=True, slots=True)
class GivenObjects:
    """What a program gives beside an experiment.

    Attributes:
        spec: the network, from whose weights every seed begins.
        data: the rows.
        source: what stands for the rows in the experiment's settings.
    """

    spec: Spec | None = None
    data: Data | None = None
    source: str = ""

    @classmethod
    def of(cls, model: nn.Module | None = None, data: Data | None = None) -> GivenObjects:
        """A module, and a `Dataset` or x_train, y_train, x_test, y_test as tensors or arrays.

        Raises:
            ConfigError: for anything else.
        """
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(
                f"model is a {type(model).__name__}, expected a torch.nn.Module; to build one by name, say it in the "
                "experiment: model = {name = 'package.module:Class'}"
            )
        spec = None if model is None else Spec.of(model)
        if data is None or isinstance(data, Dataset):
            return cls(spec, data, "" if data is None else data.name)
        if not isinstance(data, tuple | list) or len(data) != 4:
            raise ConfigError(
                f"data is a {type(data).__name__}, expected a fedfuse.data.Dataset or x_train, y_train, x_test, y_test"
            )
        arrays = [torch.as_tensor(np.asarray(part)) for part in data]
        return cls(spec, arrays, f"given-{digest_tensors(arrays)}")

    @property
    def settings(self) -> dict[str, Any]:
        """What stands for the objects in an experiment's settings.

        Names with checksums, so that a run that is resumed with other objects is known to be another run.
        """
        settings: dict[str, Any] = {}
        if self.spec is not None:
            weights = digest_tensors(self.spec.skeleton().state_dict().values())
            settings["model"] = {"name": self.spec.factory, "weights": weights}
        return settings | ({"data": {"source": self.source}} if self.source else {})

    def replace_names(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """An experiment's values with the objects' names in the place of those they had."""
        data = {**values.get("data", {}), **self.settings.get("data", {})}
        model = self.settings.get("model", values.get("model"))
        return {**values, **({"data": data} if data else {}), **({"model": model} if model else {})}

    def fetch(self, source: str, *, options: object = None, **limits: Any) -> Dataset:
        """The given rows under their name, any other source by `load`."""
        if self.data is None or source != self.source:
            return load(source, options=options, **limits)  # type: ignore[arg-type]
        if not isinstance(self.data, Dataset):
            return load_arrays(source, self.data, **limits)
        if cut := [name for name in ("train_limit", "test_limit") if limits.get(name) is not None]:
            raise ConfigError(f"data.{cut[0]} cannot cut a Dataset that a program gives; leave it out")
        return self.data


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """A short checksum of tensors: their shapes, kinds and numbers."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
