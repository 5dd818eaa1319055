"""At a site: its own rows in the agreed form, trained on, and looked at before anything is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfuse.api import Update, local_update
from fedfuse.api import recipe as recipe_of
from fedfuse.core.model import Single, outputs
from fedfuse.core.posterior import Posterior
from fedfuse.core.settings import validate_settings
from fedfuse.data.site import SiteRows, read_site
from fedfuse.errors import ConfigError
from fedfuse.experiment.keys import assign
from fedfuse.federation.agreement import Agreement, FederationFolder
from fedfuse.federation.create import read_sets
from fedfuse.server.judge import log_probabilities
from fedfuse.tasks import CLASSIFICATION
from fedfuse.wire.files import load_answering


@dataclass(frozen=True, slots=True)
class Assessment:
    """How well a site's own network does on some of its rows, beside always naming the commonest class."""

    what: str
    rows: int
    accuracy: float
    commonest: float
    spread: float | None = None

    @property
    def learnt(self) -> bool:
        """Whether the network is better than no network; nobody can tell where there is one class only."""
        return self.accuracy > self.commonest or self.commonest == 1.0


@dataclass(frozen=True, slots=True)
class SiteUpdate:
    """What a site brings, and what it should know before it sends that."""

    update: Update
    site: SiteRows
    loss: float | None
    assessment: Assessment | None
    warnings: tuple[str, ...] = field(default=())

    def facts(self) -> dict[str, Any]:
        """Everything a machine may want to read; nothing of it leaves the site by itself."""
        seen = self.assessment
        scores: dict[str, Any] = (
            {}
            if seen is None
            else {
                "accuracy": seen.accuracy,
                "accuracy_on": seen.what,
                "accuracy_rows": seen.rows,
                "commonest_class": seen.commonest,
            }
        )
        return {
            "examples": self.update.num_examples,
            "rows": len(self.site),
            "classes": self.site.counts,
            "loss": self.loss,
            **scores,
            "broken": dict(self.site.broken),
            "reveals": list(self.update.reveals),
            "warnings": list(self.warnings),
        }


def update_by_federation(
    federation: FederationFolder,
    source: str,
    *,
    client: str = "site",
    limit: int | None = None,
    hold_out: float | None = None,
    folds: int | None = None,
    skip_broken: bool = False,
) -> SiteUpdate:
    """Train as the federation agreed, from its start, on this site's rows.

    Raises:
        ConfigError: if the rows cannot be brought to its form, have classes it does not know, or are too few.
    """
    agreed = federation.agreement
    site = read_site(source, form=agreed.inputs, classes=agreed.classes, limit=limit, skip_broken=skip_broken)
    if len(site) < agreed.least_rows:
        raise ConfigError(
            f"{source} has {len(site)} rows and the federation {agreed.name!r} asks for at least {agreed.least_rows}; "
            "a network of so few says more about single rows than it may"
        )
    made = _train_and_assess(site, agreed, federation.start, client, hold_out, folds)
    update = made.update.telling(federation=agreed.name)
    return SiteUpdate(update, made.site, made.loss, made.assessment, made.warnings)


def site_update(
    source: str,
    model: str,
    method: str,
    sets: Sequence[str] = (),
    *,
    start: Path | None = None,
    client: str = "site",
    limit: int | None = None,
    seed: int = 0,
    image_size: int | None = None,
    hold_out: float | None = None,
    folds: int | None = None,
    skip_broken: bool = False,
) -> SiteUpdate:
    """Train without a federation: classes and form of rows are what the source has, by name and in that order."""
    options = read_sets(sets)
    site = read_site(source, limit=limit, image_size=image_size, skip_broken=skip_broken)
    values = {
        "seed": seed,
        "classes": site.class_names,
        "model": {"name": model, **options["model"]},
        "inputs": site.form,
        "method": {"name": method, **options["method"]},
        "local": options["local"],
    }
    agreed = validate_settings(Agreement, values)
    begin = agreed.first_weights() if start is None else start
    return _train_and_assess(site, agreed, begin, client, hold_out, folds)


def site_evidence(
    model: Path,
    source: str,
    method: str,
    sets: Sequence[str] = (),
    *,
    client: str = "site",
    limit: int | None = None,
    skip_broken: bool = False,
    trusted: Collection[str] = (),
) -> SiteUpdate:
    """Bring what a method asks for at a finished model's weights; nobody trains.

    A method that does not train, such as refit, gets the evidence alone, for a model that all sites have. Any other
    gets the weights too, which may be each site's own.

    Args:
        model: a file that `fuse`, `run` or `update` wrote; its classes and form of rows are the site's, if it tells.
        source: the site's rows.
        method: whose evidence to bring.
        sets: `key=value` for an option of the method.
        client: the site's name.
        limit: use only so many rows.
        skip_broken: leave out pictures that cannot be read.
        trusted: networks beside our own that the file may name.

    Raises:
        ConfigError: if the file holds no single network of classes, or the rows do not suit it.
    """
    options: dict[str, Any] = {}
    for text in sets:
        assign(options, text)
    network, about = load_answering(model, trusted)
    if not isinstance(network, Single) or about.task not in ("", CLASSIFICATION.name):
        raise ConfigError(f"{model} does not hold one network that tells classes; use a file that holds one")
    recipe, names = recipe_of(method, **options), about.class_names or None
    site = read_site(
        source, form=about.inputs, classes=names, limit=limit, skip_broken=skip_broken, keep_order=names is None
    )
    update = local_update(
        network.spec,
        site.rows,
        recipe,
        client=client,
        start=network.posterior.mean,
        classes=names or outputs(network) or len(site.class_names),
        inputs=site.form,
        epochs=0,
    )
    own = update.telling(start=None) if recipe.trains else update  # networks trained elsewhere share no start
    return SiteUpdate(own, site, None, None)


def _train_and_assess(
    site: SiteRows,
    agreed: Agreement,
    start: Path | Mapping[str, Tensor],
    client: str,
    hold_out: float | None,
    folds: int | None,
) -> SiteUpdate:
    used, held = site.split(hold_out) if hold_out else (site, None)
    update = _train(used, agreed, start, client)
    seen = None
    if update.state_dict():
        if folds:
            seen = _cross_validate(site, agreed, start, client, folds)
        elif held is not None and len(held):
            seen = _assess(update, held, "held-out rows")
        else:
            seen = _assess(update, used, "the rows it was trained on")
    loss = update.facts.get("loss")
    return SiteUpdate(update, site, loss, seen, tuple(_warnings(site, seen)))


def _train(site: SiteRows, agreed: Agreement, start: Path | Mapping[str, Tensor], client: str) -> Update:
    settings = dict(agreed.local.settings())  # as objects, not as plain data
    return local_update(
        agreed.spec,
        site.rows,
        agreed.method.recipe(),
        client=client,
        start=start,
        classes=agreed.classes,
        inputs=agreed.inputs,
        seed=agreed.seed,
        **settings,
    )


def _assess(update: Update, site: SiteRows, what: str) -> Assessment:
    right = _right(update, site)
    return Assessment(what, len(site), float(right.double().mean()), _commonest(site))


def _right(update: Update, site: SiteRows) -> Tensor:
    """For each row, whether the site's own network names its class."""
    if update.spec is None:
        raise ConfigError("an update that was read from a file is assessed by `fedfuse evaluate`")
    network = Single(update.spec, Posterior(update.state_dict()))
    count = len(site.class_names)
    return log_probabilities(network, site.rows.x)[:, :count].argmax(-1) == site.rows.y


def _commonest(site: SiteRows) -> float:
    """The share of the commonest class, which a network that learnt nothing gets right."""
    return max(site.counts.values()) / len(site)


def _cross_validate(
    site: SiteRows, agreed: Agreement, start: Path | Mapping[str, Tensor], client: str, folds: int
) -> Assessment:
    """Every row is judged once, by a network that was trained without its fold."""
    fold_of = _folds(site.rows.y, folds)
    each = []
    for fold in range(folds):
        inside, outside = ((fold_of == fold) == kept for kept in (False, True))
        if not outside.any() or not inside.any():
            raise ConfigError(f"{site.source} has {len(site)} rows, too few for {folds} folds; take fewer")
        trained = _train(site.take(inside.nonzero()[0].tolist()), agreed, start, client)
        each.append(_right(trained, site.take(outside.nonzero()[0].tolist())).double())
    accuracies = torch.stack([right.mean() for right in each])
    whole = float(torch.cat(each).mean())
    return Assessment(f"rows of {folds} folds", len(site), whole, _commonest(site), float(accuracies.std()))


def _folds(y: Tensor, folds: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The fold of each row: every class dealt out in turn, always the same way."""
    draw = np.random.default_rng(0)
    fold_of = np.zeros(len(y), dtype=np.int64)
    dealt = 0
    for label in np.unique(y.numpy()):
        members = draw.permutation(np.flatnonzero(y.numpy() == label))
        fold_of[members] = (dealt + np.arange(len(members))) % folds
        dealt += len(members)
    return fold_of


def _warnings(site: SiteRows, seen: Assessment | None) -> list[str]:
    said = []
    if seen is not None and not seen.learnt:
        said.append(
            f"the network did not learn: {seen.accuracy:.1%} right on {seen.what}, and naming the commonest class "
            f"always gets {seen.commonest:.1%}; train longer or with another rate (--set local.epochs, "
            "local.optimizer.lr) before you send it"
        )
    if sum(count > 0 for count in site.counts.values()) == 1:
        said.append(f"all rows of {site.source} are of one class, so its network can tell nothing apart")
    return said
