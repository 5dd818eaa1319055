"""Models as files: plain safetensors that any reader opens, with a header that lets us rebuild the network."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfuse.core.metadata import About
from fedfuse.core.model import Apart, Model, Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Diag, Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import entries_of, with_kind
from fedfuse.errors import ConfigError
from fedfuse.nets.mixture import FeatureRegion, Mixture, combine_named
from fedfuse.wire.codec import Malformed, Packet, forms_of, read, write_sealed
from fedfuse.wire.messages import VERSION, mark_notes, split


def save_model(
    model: Model,
    path: Path,
    facts: Mapping[str, Any] | None = None,
    about: About | None = None,
    notes: Params | None = None,
) -> int:
    """Write a model to one file; a single network's tensors stand under their plain names.

    Args:
        model: one network, or several.
        path: the file.
        facts: whatever else its writer wants to find there again.
        about: what it says of itself: classes, inputs, method, sites.
        notes: further tensors of a single network's file, such as the sums it was made of.

    Returns:
        The file's size in bytes.
    """
    header: dict[str, Any] = {"kind": "model", "version": VERSION, "facts": dict(facts or {})}
    header |= {} if about is None else about.to_json()
    if isinstance(model, Single):
        tensors = {**_tensors(model), **mark_notes(notes or {})}
        return write_sealed(path, tensors, header | {"spec": model.spec.to_json()})
    tensors = dict[str, Tensor]()
    for index, member in enumerate(model.members):
        tensors |= {f"{index}/{n}": t for n, t in _tensors(member).items()}
    for index, region in enumerate(model.regions if isinstance(model, Mixture) else ()):
        tensors |= {f"{index}/{n}": t for n, t in mark_notes(region.to_notes()).items()}
    header |= {"members": [m.spec.to_json() for m in model.members]}
    if isinstance(model, Mixture):
        header |= {"combine": type(model.combine).__name__, "options": asdict(model.combine)}  # type: ignore[call-overload]
        header |= {"weights": model.weights.tolist()}
    return write_sealed(path, tensors, header)


def load_model(path: Path, trusted: Collection[str] = (), like: Spec | None = None) -> tuple[Model, Mapping[str, Any]]:
    """Read a model file back, with its facts.

    Args:
        path: the file.
        trusted: networks other than our own that it may name.
        like: a network that came as an object; where the file names its class, it is built of it.

    Raises:
        ConfigError: if the file is damaged, is no model, or names a network that was not named here.
    """
    with _refusing(path, "is not a model file of fedfuse"):
        packet = read(path)
        task = {"task": packet.header["task"]} if "task" in packet.header else {}
        return _model(packet, trusted, like), {**packet.header.get("facts", {}), **task}


def load_answering(path: Path, trusted: Collection[str] = ()) -> tuple[Model, About]:
    """Read a model or an update back, to ask it: an update answers by its trained network.

    Raises:
        ConfigError: if the file is damaged, holds no network, or names one that was not named here.
    """
    with _refusing(path, "is neither a model nor an update of fedfuse"):
        packet = read(path)
        if packet.header.get("kind") == "reply":
            own, _ = split(packet)
            return _single(Spec.from_json(packet.header.get("spec"), trusted), own, {}), About.of(packet.header)
        facts = packet.header.get("facts")
        task = {"task": facts["task"]} if isinstance(facts, dict) and "task" in facts else {}
        return _model(packet, trusted), About.of({**task, **packet.header})


@contextmanager
def _refusing(path: Path, fault: str) -> Iterator[None]:
    """One sentence about a file, whatever goes wrong with a header that any sender may have written."""
    try:
        yield
    except ConfigError:  # has its own sentence
        raise
    except (Malformed, KeyError, TypeError, IndexError, ValueError) as why:
        raise ConfigError(f"{path} {fault}: {why}") from why


def _tensors(model: Single) -> Params:
    geometry = model.posterior.geometry
    variance = with_kind("variance", geometry.variance) if isinstance(geometry, Diag) else {}
    return {**model.posterior.mean, **mark_notes(variance)}


def _model(packet: Packet, trusted: Collection[str], like: Spec | None = None) -> Model:
    header = packet.header
    if header.get("kind") != "model":
        raise Malformed(f"it holds a {header.get('kind') or 'plain set of tensors'}, expected a model")
    if "members" not in header:
        return _single(Spec.from_json(header.get("spec"), trusted).with_prototype_of(like), *split(packet))
    if not isinstance(header["members"], list) or not header["members"]:
        raise Malformed("it names no networks, expected at least one member")
    members, regions = list[Single](), list[FeatureRegion]()
    for index, spec in enumerate(header["members"]):
        mine = packet.tensors.part(lambda n, p=f"{index}/": n.startswith(p), lambda n: n.partition("/")[2])  # type: ignore[misc]
        own, notes = split(Packet({}, mine, 0))
        members.append(_single(Spec.from_json(spec, trusted).with_prototype_of(like), own, notes))
        regions += [region] if (region := FeatureRegion.from_notes(notes)) is not None else []
    if "combine" not in header:
        return Apart(tuple(members))
    weights = torch.tensor(header["weights"], dtype=torch.float64)
    return Mixture(tuple(members), weights, combine_named(header["combine"], header["options"]), regions=tuple(regions))


def _single(spec: Spec, own: Params, notes: Params) -> Single:
    if spec.shapes() != {n: tuple(form) for n, form in forms_of(own).items()}:
        raise Malformed(f"its tensors do not fit the network {spec.factory!r} it names")
    mean, variance = dict(own), entries_of(dict(notes), "variance")
    return Single(spec, Posterior(mean, Diag(variance)) if variance else Posterior(mean))
