"""The public surface for methods of other packages: the seams, what fills them, and how a method is registered.

Whatever is named here keeps its name and its meaning within a minor version. A method in a package of yours imports
from here and from nowhere else in fedfuse:

Example:
    >>> from fedfuse.extend import Mean, Recipe, method
    >>> @method("plain_mean")
    ... def plain_mean(uniform: bool = False) -> Recipe:
    ...     '''The mean of the weights.
    ...
    ...     Args:
    ...         uniform: weigh every client alike.
    ...     '''
    ...     return Recipe(aggregate=Mean(uniform))
    >>> import fedfuse
    >>> fedfuse.recipe("plain_mean", uniform=True).aggregate
    Mean(uniform=True)
    >>> forget_method("plain_mean")
"""

from fedfuse.client.objectives import Contrastive, Proximal
from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Flaw, Form
from fedfuse.core.model import Apart, Single
from fedfuse.core.params import Layer, Layout, Params
from fedfuse.core.posterior import Diag, Flat, Kron, Posterior
from fedfuse.core.recipe import FirstStep, ModelPreparation, Recipe
from fedfuse.core.registry import forget_method, method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import (
    Aggregator,
    Alignment,
    Batch,
    Evidence,
    Guard,
    Objective,
    PlainEvidence,
    Project,
    Roster,
    ServerPart,
    ServerStep,
    TaskLoss,
    View,
)
from fedfuse.core.settings import LocalSettings, Optimizer, Settings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.methods.scaffold import Controlled
from fedfuse.nets.mixture import Mixture
from fedfuse.server.aggregate.mean import ALL_LAWS, Mean, weighted_mean
from fedfuse.server.filters import with_filters

__all__ = [
    "ALL_LAWS",
    "Aggregator",
    "Alignment",
    "Apart",
    "Batch",
    "Bench",
    "Brief",
    "ClientUpdate",
    "Cohort",
    "Contrastive",
    "Controlled",
    "Diag",
    "Evidence",
    "FirstStep",
    "Flat",
    "Flaw",
    "Form",
    "Guard",
    "Kron",
    "Layer",
    "Layout",
    "Local",
    "LocalSettings",
    "Mean",
    "Mixture",
    "ModelPreparation",
    "Objective",
    "Optimizer",
    "Params",
    "PlainEvidence",
    "Posterior",
    "Project",
    "Proximal",
    "Recipe",
    "Roster",
    "Rows",
    "ServerPart",
    "ServerState",
    "ServerStep",
    "Settings",
    "Single",
    "Spec",
    "TaskLoss",
    "View",
    "forget_method",
    "method",
    "weighted_mean",
    "with_filters",
]
