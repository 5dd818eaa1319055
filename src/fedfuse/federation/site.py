"""At a site: its own rows in the agreed form, trained on, and looked at before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfuse.api import Update, local_update
from fedfuse.core.inputs import TableForm, TextForm
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.settings import validate_settings
from fedfuse.core.state import EXAMPLES
from fedfuse.data.rows import SiteRows
from fedfuse.data.site import read_site
from fedfuse.errors import ConfigError
from fedfuse.federation.agreement import Agreement, FederationFolder
from fedfuse.federation.create import read_sets
from fedfuse.federation.moments import TableAgreement, check_told_by_cells, chosen_table
from fedfuse.server.judge import answers
from fedfuse.tasks import (
    CLASSIFICATION,
    Binary,
    Classification,
    LanguageModel,
    Multilabel,
    Regression,
    Task,
    scores_better,
    task_named,
)


@dataclass(frozen=True, slots=True)
class Assessment:
    """How well a site's own network does on some of its rows, and what the best constant answer would.

    Attributes:
        what: which rows.
        rows: how many.
        score: the task's headline on them: accuracy, for numbers the RMSE, of a language model the perplexity.
        constant: the same of always naming the commonest class, the mean, or characters by their frequency.
        spread: of the score over folds.
        task: what is scored.
    """

    what: str
    rows: int
    score: float
    constant: float
    spread: float | None = None
    task: Task = CLASSIFICATION

    @property
    def learnt(self) -> bool:
        """Whether the network beats a constant answer; taken as true where a constant is always right."""
        perfect = 0.0 if isinstance(self.task, Regression) else 1.0
        return scores_better(self.task, self.score, self.constant) or self.constant == perfect

    @property
    def constant_words(self) -> str:
        """What the constant answer is called."""
        if isinstance(self.task, LanguageModel):
            return "characters by how common they are"
        return "always the mean" if isinstance(self.task, Regression) else "commonest class"

    @property
    def score_name(self) -> str:
        """What the score is called: abbreviations in capitals."""
        return "RMSE" if isinstance(self.task, Regression) else self.task.headline

    def words(self, score: float) -> str:
        """A score as people read it: a share in percent, an error in the unit of its target."""
        return f"{score:.1%}" if self.task.headline == "accuracy" else f"{score:.4g}"


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
                (name := seen.task.headline): seen.score,
                f"{name}_on": seen.what,
                f"{name}_rows": seen.rows,
                seen.constant_words.replace(" ", "_"): seen.constant,
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
    names = agreed.output_names
    site = read_site(
        source, form=agreed.inputs, classes=names, limit=limit, skip_broken=skip_broken, task=agreed.learns
    )
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
    task: str = CLASSIFICATION.name,
    table: TableAgreement | None = None,
    classes: Sequence[str] = (),
    all_examples: int | None = None,
) -> SiteUpdate:
    """Train without a federation: classes and form of rows are what the source has, by name and in that order."""
    options, learns = read_sets(sets), task_named(task)
    form, choice = chosen_table(table or TableAgreement(), learns)
    site = read_site(
        source,
        form=form,
        classes=classes or None,
        limit=limit,
        image_size=image_size,
        skip_broken=skip_broken,
        task=learns,
        table=choice,
    )
    check_told_by_cells(site, classes)
    named = not isinstance(site.form, TableForm | TextForm) or isinstance(learns, Classification | Binary)
    values = {
        "seed": seed,
        "task": learns.name,
        "classes": site.class_names if named else (),
        "model": {"name": model, **options["model"]},
        "inputs": site.form,
        "method": {"name": method, **options["method"]},
        "local": options["local"],
        "all_examples": all_examples,
    }
    agreed = validate_settings(Agreement, values)
    begin = agreed.first_weights() if start is None else start
    return _train_and_assess(site, agreed, begin, client, hold_out, folds)


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
    return SiteUpdate(update, site, loss, seen, (*site.remarks, *_warnings(site, agreed, seen)))


def _train(site: SiteRows, agreed: Agreement, start: Path | Mapping[str, Tensor], client: str) -> Update:
    settings = dict(agreed.local.settings())  # as objects, not as plain data
    return local_update(
        agreed.spec,
        site.rows,
        agreed.method.recipe(),
        client=client,
        start=start,
        classes=agreed.output_names,
        inputs=agreed.inputs,
        task=agreed.learns,
        seed=agreed.seed,
        all_examples=agreed.all_examples or 0,
        **settings,
    )


def _assess(update: Update, site: SiteRows, what: str) -> Assessment:
    return _assessment(_answers(update, site), site, what)


def _assessment(outputs: Tensor, site: SiteRows, what: str, spread: float | None = None) -> Assessment:
    task, classes = site.task_in_units, len(site.class_names)
    score = task.score(outputs, site.rows.y, classes)
    return Assessment(what, len(site), score, _constant_score(site), spread, task)


def _answers(update: Update, site: SiteRows) -> Tensor:
    """The outputs of the site's own network, row by row."""
    if update.spec is None:
        raise ConfigError("an update that was read from a file is assessed by `fedfuse evaluate`")
    return answers(Single(update.spec, Posterior(update.state_dict())), site.rows.x)


def _constant_score(site: SiteRows) -> float:
    """What a network that learnt nothing gets: the share of the commonest class, or the error of the mean."""
    if site.counts:
        shares = [count / len(site) for count in site.counts.values()]
        return max(shares) if not isinstance(site.task, Multilabel) else fmean(max(s, 1 - s) for s in shares)
    if isinstance(site.task, LanguageModel):
        counts = site.rows.y[site.rows.y >= 0].bincount(minlength=len(site.class_names)).double()
        logits = (counts / counts.sum()).log().expand(*site.rows.y.shape, -1)
        return site.task.score(logits, site.rows.y, len(site.class_names))
    y = site.rows.y.reshape(len(site), -1)
    return site.task_in_units.score(y.mean(0, keepdim=True).expand_as(y), site.rows.y, y.shape[1])


def _cross_validate(
    site: SiteRows, agreed: Agreement, start: Path | Mapping[str, Tensor], client: str, folds: int
) -> Assessment:
    """Every row is judged once, by a network that was trained without its fold."""
    fold_of = _folds(site.strata, folds)
    each, scores = list[tuple[list[int], Tensor]](), list[float]()
    for fold in range(folds):
        inside, outside = ((fold_of == fold) == kept for kept in (False, True))
        if not outside.any() or not inside.any():
            raise ConfigError(f"{site.source} has {len(site)} rows, too few for {folds} folds; take fewer")
        trained = _train(site.take(inside.nonzero()[0].tolist()), agreed, start, client)
        places = outside.nonzero()[0].tolist()
        each.append((places, _answers(trained, site.take(places))))
        scores.append(_assessment(each[-1][1], site.take(places), "").score)
    order = torch.tensor([place for places, _ in each for place in places]).argsort()
    outputs = torch.cat([answered for _, answered in each])[order]
    return _assessment(outputs, site, f"rows of {folds} folds", stdev(scores))


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


def _warnings(site: SiteRows, agreed: Agreement, seen: Assessment | None) -> list[str]:
    said = []
    if seen is not None and not seen.learnt:
        right = " right" if seen.task.headline == "accuracy" else f" {seen.score_name}"
        better = "naming the commonest class always gets" if right == " right" else f"{seen.constant_words} gets"
        said.append(
            f"the network did not learn: {seen.words(seen.score)}{right} on {seen.what}, and {better} "
            f"{seen.words(seen.constant)}; train longer or with another rate (--set local.epochs, "
            "local.optimizer.lr) before you send it"
        )
    if not isinstance(site.task, Multilabel) and sum(count > 0 for count in site.counts.values()) == 1:
        said.append(f"all rows of {site.source} are of one class, so its network can tell nothing apart")
    if agreed.all_examples is None and EXAMPLES in agreed.method.recipe().publishes:
        said.append(
            f"method {agreed.method.name!r} weighs its prior by this site's share of all examples and nobody says how "
            "many there are, so the prior was counted in full; give --all-examples, or use pvi, which needs no such "
            "number"
        )
    return said
