"""Analytic federated learning: AFL (CVPR 2025), Fed3R (ICML 2024), FedCGS (AAAI 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from fedfuse.core.inputs import own_form
from fedfuse.core.messages import Form
from fedfuse.core.model import Single, outputs
from fedfuse.core.params import Layout
from fedfuse.core.recipe import AsChosen, Recipe
from fedfuse.core.registry import method
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.methods._closed_form import USUAL, HeadFit
from fedfuse.models.random_features import random_convolution, random_fourier
from fedfuse.tasks import CLASSIFICATION, Task

Features = Literal["random", "given"]

_POOL = 4
_FACTORIES = (random_convolution.__name__, random_fourier.__name__)


@dataclass(frozen=True, slots=True)
class RandomFeatures:
    """Random convolutions where the chosen network reads pictures, random cosines where it reads rows of a table.

    Attributes:
        count: about how many features.

    Example:
        >>> spec = Spec("lenet")
        >>> RandomFeatures()(Single.of(spec.build(), spec), classes=10, seed=3).spec.options["filters"]
        29
    """

    count: int = 464
    needs_numbers: ClassVar[bool] = True

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:
        """The feature network; one that is there already stays as it is."""
        if start.spec.factory in _FACTORIES:
            return start
        spec = self._spec(start.spec, task.outputs(classes) if classes else outputs(start) or 0, seed)
        return Single.of(spec.build(), spec)

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:  # noqa: ARG002
        """Nothing: whichever network the sums were made at, they are its own."""
        return None

    def _spec(self, chosen: Spec, classes: int, seed: int) -> Spec:
        form = own_form(chosen)
        if form is None:
            raise ConfigError(
                f"model {chosen.factory!r} does not say what an input looks like, so no features of it can be drawn; "
                "choose a network of fedfuse's, or features = 'given' for those of your own"
            )
        common: dict[str, Any] = {"classes": classes, "seed": seed}
        if len(form.shape) == 1:
            return Spec("random_fourier", {"inputs": form.shape[0], "features": self.count, **common})
        channels, size, _ = form.shape
        return Spec(
            "random_convolution",
            {"channels": channels, "size": size, "filters": max(1, round(self.count / _POOL**2)), **common},
        )


@method("ridge", paper="arXiv:2405.16240", family="statistics")
def ridge(features: PositiveInt | Literal["given"] = 464, how: HeadFit = USUAL) -> Recipe:
    """Frozen features and a closed-form classifier: clients send sums, and the fused answer is the pooled one.

    W = (ΣG + λI)⁻¹ ΣH with G = Σφφᵀ and H = Σφtᵀ is ridge regression on everybody's rows, whatever the partition, in
    one exchange and without a step of training.

    Args:
        features: about how many random features take the place of the network: convolutions for pictures, cosines for
            tables; or "given" for those of the network as it starts, a pretrained one say.
        how: which sums, and how the head is fitted to them.
    """
    return Recipe(
        trains=False,
        evidence=(how.evidence,),
        aggregate=how.fit(),
        prepare_model=AsChosen() if features == "given" else RandomFeatures(features),
    )
