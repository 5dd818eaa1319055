"""A site that only has files: train and write one, or fuse those that came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfuse.api import Fused, Update, fuse, local_update
from fedfuse.api import method as recipe_of
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
    sets: Sequence[str],
    start: Path | None,
    masses: Sequence[float] | None,
    quorum: float,
    model: str | None,
) -> Fused:
    """Fuse update files by a method with its options."""
    options: dict[str, Any] = {}
    for text in sets:
        assign(options, text)
    for path in updates:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
    spec = None if model is None else Spec(model)
    return fuse(updates, recipe_of(method, **options), masses=masses or None, start=start, model=spec, quorum=quorum)
