"""What a fused model sees: its last representation of test rows, laid out in the plane."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, representation
from fedfuse.data import Dataset, Dirichlet, find, load, partition
from fedfuse.engines.local import InProcess, Population
from fedfuse.experiment.reproduce import figure
from fedfuse.server.admission.admit import Admission, admit_all

SHOWN = 1200  # test rows drawn
SEED = 0


@dataclass(frozen=True, slots=True)
class View:
    """One model's representation of the test rows in the plane, and how often it is right."""

    title: str
    places: np.ndarray
    accuracy: float


@dataclass(frozen=True, slots=True)
class Scene:
    """Who trains what on which rows."""

    data: Dataset
    spec: Spec
    local: LocalSettings
    scheme: Dirichlet


def scene() -> Scene:
    """MNIST and LeNet as in the paper, on fewer rows; without MNIST the bundled digits and a small network."""
    if find("mnist"):
        lenet = Spec("lenet", {"channels": 1, "size": 28, "classes": 10})
        local = LocalSettings(epochs=10, optimizer=Optimizer(lr=0.01, momentum=0.9, weight_decay=1e-5))
        return Scene(load("mnist", train_limit=12_000), lenet, local, Dirichlet(alpha=0.05, compat="niid-bench"))
    mlp = Spec("mlp", {"inputs": 64, "hidden": [64], "classes": 10})
    local = LocalSettings(epochs=10, batch_size=16, optimizer=Optimizer(lr=0.05, momentum=0.9))
    return Scene(load("digits"), mlp, local, Dirichlet(alpha=0.05))


@figure("fedlpa-features", paper="FedLPA, Figures 1, 4 and 5")
def draw_features(folder: Path) -> list[Path]:
    """What one client, FedAvg and FedLPA see after one exchange of very skewed clients, by t-SNE."""
    shown = scene()
    test = shown.data.test.take(range(min(SHOWN, len(shown.data.test))))
    recipes = {title: find_method(title.lower()).recipe() for title in ("FedAvg", "FedLPA")}
    state, admission = _exchange(shown, recipes["FedLPA"])
    largest = max(admission.cohort, key=lambda u: u.num_examples)
    models = {f"one client ({largest.client})": Single(shown.spec, Posterior(largest.posterior.mean))}
    for title, recipe in recipes.items():
        models[title] = recipe.aggregate(admission.cohort, state, Bench(classes=10, seed=SEED)).single
    views = [_view(title, model, test) for title, model in models.items()]
    return [_draw(views, test.y.numpy(), shown.data.name, folder / "fedlpa-features.png")]


def _exchange(shown: Scene, recipe: Recipe) -> tuple[ServerState, Admission]:
    """Ten clients train from one start."""
    rows = shown.data.train
    population = Population(rows, partition(rows.y, shown.scheme, 10, SEED).clients)
    with seeded(SEED, "start"):
        state = ServerState(0, Single.of(shown.spec.build(), shown.spec))
    brief, clients = state.brief((), 10), population.clients
    replies = list(InProcess(population, SEED).exchange(brief, recipe.work(shown.local), clients))
    return state, admit_all(replies, brief, recipe.evidence, clients)


def _view(title: str, model: Single, test: Rows) -> View:
    from sklearn.manifold import TSNE

    module = model.spec.build().eval()
    module.load_state_dict(dict(model.posterior.mean))
    with torch.no_grad():
        logits, seen = representation(module, test.x)
    places = TSNE(2, perplexity=30, init="pca", random_state=SEED).fit_transform(_scaled(seen))
    return View(title, places, float((logits.argmax(-1) == test.y).double().mean()))


def _scaled(seen: Tensor) -> np.ndarray:
    scaled: np.ndarray = (seen / seen.norm(dim=1).mean().clamp(min=1e-12)).double().numpy()
    return scaled


def _draw(views: list[View], labels: np.ndarray, source: str, path: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(views), figsize=(13.5, 4.9), layout="constrained")
    colours: Any = plt.get_cmap("tab10")
    for axis, view in zip(axes, views, strict=True):
        for label in range(10):
            mine = view.places[labels == label]
            axis.scatter(*mine.T, s=9, color=colours(label), lw=0, alpha=0.85, label=str(label))
            middle = np.median(mine, 0)
            axis.text(
                *middle, str(label), fontsize=11, weight="bold", ha="center", va="center", bbox=_badge(colours(label))
            )
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color("#cbd2d9")
        axis.set_title(f"{view.title}: {view.accuracy:.0%} right", fontsize=12)
    figure.suptitle(
        f"{source}: ten clients, Dirichlet 0.05, one exchange; t-SNE of {len(labels)} test rows before the classifier",
        fontsize=11,
        color="#52606d",
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def _badge(colour: Any) -> dict[str, Any]:
    return {"boxstyle": "circle,pad=0.18", "fc": "white", "ec": colour, "lw": 1.6, "alpha": 0.9}
