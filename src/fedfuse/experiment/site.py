"""A site that only has files: train and write one, or fuse those that came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfuse.api import Fused, Update, fuse, local_update
from fedfuse.api import recipe as recipe_of
from fedfuse.core.rng import seeded
from fedfuse.core.settings import checked
from fedfuse.core.spec import Spec
from fedfuse.data import augmentation, load
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import LocalConfig, Named, assign
from fedfuse.experiment.prepare import spec_for


def site_update(
    source: str,
    model: str,
    method: str,
    sets: Sequence[str],
    start: Path | None,
    client: str,
    train_limit: int | None,
    seed: int,
) -> Update:
    """Train on a source's training rows and bring what the method asks for."""
    said: dict[str, Any] = {"model": {}, "local": {}, "method": {}}
    for text in sets:
        if text.split(".", 1)[0] not in said:
            raise ConfigError(f"--set {text!r} must begin with model., local. or method.")
        assign(said, text)
    recipe = recipe_of(method, **said["method"])
    local = checked(LocalConfig, said["local"], "local")
    dataset = load(source, train_limit=train_limit)
    spec = spec_for(Named(name=model, **said["model"]), dataset)
    settings = local.model_dump() | {"augment": augmentation(local.augment) if local.augment else None}
    with seeded(seed, "start"):
        begin = start if start is not None else spec.build().state_dict()
    return local_update(
        spec, dataset.train, recipe, client=client, start=begin, classes=len(dataset.classes), seed=seed, **settings
    )


def fuse_files(
    updates: Sequence[Path],
    method: str,
    sets: Sequence[str] = (),
    *,
    start: Path | None = None,
    num_examples: Sequence[float] | None = None,
    quorum: float = 0.5,
    models: Sequence[str] = (),
    guard: str | None = None,
    align: str | None = None,
    server_data: str | None = None,
    unlabelled: str | None = None,
    seed: int = 0,
) -> Fused:
    """Fuse update files by a method with its options.

    Args:
        updates: the files.
        method: the method's name.
        sets: `key=value` for an option of the method, `guard.key=value` and `align.key=value` for one of theirs.
        start: the weights all started from.
        num_examples: examples behind each file.
        quorum: the share that must be admitted.
        models: networks that may be run, as names of `fedfuse.models` or package.module:Class.
        guard: a robust filter's name.
        align: an alignment's name.
        server_data: a source whose training rows the server holds.
        unlabelled: a source whose training inputs the server holds, their labels unseen.
        seed: fixes every random draw of the server.
    """
    options: dict[str, Any] = {}
    for text in sets:
        assign(options, text)
    filters = {kind: _with_options(kind, name, options) for kind, name in (("guard", guard), ("align", align))}
    for path in updates:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
    return fuse(
        updates,
        recipe_of(method, **options),
        num_examples=num_examples or None,
        start=start,
        model=[Spec(name) for name in models] or None,
        server_rows=None if server_data is None else load(server_data).train,
        unlabelled=None if unlabelled is None else load(unlabelled).train.x,
        quorum=quorum,
        seed=seed,
        **filters,
    )


def _with_options(kind: str, name: str | None, options: dict[str, Any]) -> dict[str, Any] | None:
    """A filter's name with the options given under its kind, which are taken out of the method's."""
    own = options.pop(kind, {})
    if name is None and own:
        raise ConfigError(f"--set {kind}.{next(iter(own))} is an option of a filter; name it with --{kind}")
    return None if name is None else {"name": name, **own}
