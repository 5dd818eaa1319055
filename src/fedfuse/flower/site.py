"""A site's side of an experiment on a Flower federation: enrol, then do a client's rounds.

The work is never sent: a site makes it from its own copy of the file, and the brief only says which one is meant. In a
deployment its rows are its own: a source named by the node's config (`data`) or by `$FEDFUSE_SITE_DATA`, and never the
file's. Only inside Flower's simulation engine, where every node is a part of one data set on one machine, are rows
dealt out as the file says.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.data import load
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment, load_experiment
from fedfuse.experiment.prepare import Setting, prepare
from fedfuse.flower.client import check_work, client_reply, reply_with
from fedfuse.flower.engine import ENROL, SITE
from fedfuse.flower.records import Order, read_brief
from fedfuse.tasks import task_named

from flwr.app import ConfigRecord, Context, Message, RecordDict  # isort: skip - after records has checked
from flwr.clientapp import ClientApp  # isort: skip

SITE_DATA, SITE_NAME = "FEDFUSE_SITE_DATA", "FEDFUSE_SITE_NAME"


class Enrolment(NamedTuple):
    """How a site describes itself: a name, how many rows it has, and its number if it is part of a simulation."""

    name: str
    rows: int
    partition: int = -1


class Site(Protocol):
    """What a site has of its own: rows, and a copy of the experiment. `FileSite` is the one of an app."""

    @property
    def trusted_factories(self) -> frozenset[str]:
        """Networks that are not fedfuse's and may be built because the site's own file names them."""
        ...

    def enrol(self, context: Context) -> Enrolment:
        """Who this site is."""
        ...

    def rows(self, context: Context, brief: Brief, order: Order) -> Rows:
        """The rows to train on."""
        ...

    def work(self, order: Order, round_: int) -> Work:
        """The client half of the method in force."""
        ...


def site_app(path: str | Path) -> ClientApp:
    """Flower's `ClientApp` for a site with a copy of the experiment file."""
    return client_app(FileSite(Path(path)))


def client_app(site: Site) -> ClientApp:
    """Flower's `ClientApp` for a site; an error is reported to the server and does not end the site."""
    app = ClientApp()

    @app.query(ENROL.partition(".")[2])
    def enrol(message: Message, context: Context) -> Message:
        return reply_with(message, lambda: RecordDict({SITE: ConfigRecord(site.enrol(context)._asdict())}))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return reply_with(message, lambda: do_round(message.content, context))

    def do_round(content: RecordDict, context: Context) -> RecordDict:
        brief, order = read_brief(content, site.trusted_factories)
        work = site.work(order, brief.round)
        check_work(work, order)  # before the rows are read
        return client_reply(work, brief, order, site.rows(context, brief, order), context)

    return app


@dataclass(frozen=True, slots=True)
class FileSite:
    """A site that has a copy of the experiment file, and its own rows or its part of a simulation's."""

    path: Path

    @property
    def trusted_factories(self) -> frozenset[str]:
        """The networks its own copy of the file names."""
        experiment = _experiment(self.path)
        named = (Spec(model.name, model.options).factories for model in (experiment.model, *experiment.models))
        return frozenset[str]().union(*named)

    def enrol(self, context: Context) -> Enrolment:
        """Its name and how many rows it has; in a simulation, its number."""
        if source := _source(context):
            name = context.node_config.get("name") or os.environ.get(SITE_NAME, "")
            return Enrolment(str(name), len(_own_rows(self.path, source)))
        return Enrolment("", 0, _partition_id(context))

    def rows(self, context: Context, brief: Brief, order: Order) -> Rows:
        """Its own rows, or those the file deals to this client."""
        if not (source := _source(context)):
            _partition_id(context)  # raises outside a simulation: an operator who forgot the data hears of it
            return _setting(self.path, order.seed).population.rows_of(order.client)
        rows = _own_rows(self.path, source)
        if flaw := brief.task.flaw(rows.y, brief.classes):
            raise ConfigError(f"{source}: {flaw} (task {brief.task.name}); number this site's targets as the others do")
        return rows

    def work(self, order: Order, round_: int) -> Work:
        """The client half of the method its copy of the file has under that label."""
        recipes = _experiment(self.path).build_recipes()
        if order.label not in recipes:
            raise ConfigError(f"this site's experiment has no method {order.label!r}; it has {', '.join(recipes)}")
        return recipes[order.label].at(round_).work(_experiment(self.path).local.settings())


def _source(context: Context) -> str:
    """The source of this site's own rows; empty if none is configured."""
    return str(context.node_config.get("data") or os.environ.get(SITE_DATA, ""))


def _partition_id(context: Context) -> int:
    """This node's number in a simulation; a real site must not fall back to the file's data set."""
    partition_id = context.node_config.get("partition-id")
    ray = sys.modules.get("ray")  # a node's config is its operator's word; only in a simulation is Ray at work
    if isinstance(partition_id, int) and ray is not None and ray.is_initialized():
        return partition_id
    raise ConfigError(
        f"this site has no data: start its SuperNode with --node-config 'data=\"SOURCE\"' or {SITE_DATA}=SOURCE, where "
        "SOURCE is a folder, an .npz or package.module:function"
    )


# A node's process serves many rounds, and in a simulation many clients: files and data sets are read once.
@lru_cache(maxsize=4)
def _experiment(path: Path) -> Experiment:
    return load_experiment(path)


@lru_cache(maxsize=2)
def _setting(path: Path, seed: int) -> Setting:
    return prepare(_experiment(path)).setting(seed)


@lru_cache(maxsize=2)
def _own_rows(path: Path, source: str) -> Rows:
    options = _experiment(path).data.options if Path(source).is_dir() else {}
    rows = load(source, options=options or None, task=task_named(_experiment(path).task)).train
    if not len(rows):
        raise ConfigError(f"{source} has no training rows; point this site to its data")
    return rows
