"""At a site: what a method asks for at a finished network, of fedfuse's or trained elsewhere; nothing is trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from fedfuse.api import bring_evidence
from fedfuse.core.metadata import About
from fedfuse.core.model import Single, outputs
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.spec import Spec
from fedfuse.data.rows import SiteRows
from fedfuse.data.site import read_site
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import NameWithOptions
from fedfuse.experiment.prepare import spec_with
from fedfuse.federation.agreement import FederationFolder
from fedfuse.federation.fusion import chosen_recipe, read_options
from fedfuse.federation.moments import TableAgreement, check_told_by_cells, chosen_table
from fedfuse.federation.site import SiteUpdate
from fedfuse.tasks import CLASSIFICATION, Classification, Task, task_header, task_named
from fedfuse.wire.codec import Altered, Malformed, read
from fedfuse.wire.files import load_answering
from fedfuse.wire.messages import read_memory


@dataclass(frozen=True, slots=True)
class Saying:
    """What a user says of rows where neither a file nor a federation does.

    Attributes:
        task: what is to be learned.
        classes: the names of all classes.
        table: the target and columns of a table.
        image_size: width and height to resize pictures to.
    """

    task: str | None = None
    classes: tuple[str, ...] = ()
    table: TableAgreement = field(default_factory=TableAgreement)
    image_size: int | None = None


def site_evidence(
    model: Path,
    source: str,
    method: str | None = None,
    sets: Sequence[str] = (),
    *,
    client: str = "site",
    limit: int | None = None,
    skip_broken: bool = False,
    trusted: Sequence[str] = (),
    federation: FederationFolder | None = None,
    saying: Saying | None = None,
    own: Path | None = None,
) -> SiteUpdate:
    """Bring what a method asks for at a finished model's weights, without training.

    A method that does not train, such as refit, gets the evidence alone, for a model that all sites have. Any other
    gets the weights too, which may be each site's own.

    Args:
        model: a file that `fuse`, `run` or `update` wrote, or plain safetensors of a network trained elsewhere.
        source: the site's rows.
        method: whose evidence to bring; by default the federation's, or else refit.
        sets: `key=value` for an option of the method, `model.key=value` for one of a network trained elsewhere.
        client: the site's name.
        limit: use at most this many rows.
        skip_broken: leave out pictures that cannot be read.
        trusted: networks of other packages that the file may name; for plain weights, the network they are of.
        federation: what the sites agreed on: classes, task, form of rows, network and method.
        saying: the same by words, where neither the file nor a federation tells.
        own: the update this site brought when it trained, for a method that asks for the site's own layers.

    Raises:
        ConfigError: if the file holds no single network, or the rows do not suit it.
    """
    options, saying = read_options(sets), saying or Saying()
    of_model = options.pop("model", {})
    finished = _open(model, trusted)
    about = finished.about if federation is None else _agreed_about(federation)
    recipe = chosen_recipe(method, options, federation, default="refit")
    site = _read_rows(source, about, saying, limit, skip_broken)
    check_told_by_cells(site, about.class_names or saying.classes)
    spec = finished.spec or _name_network(model, trusted, federation, of_model, site)
    update = bring_evidence(
        spec,
        site.rows,
        recipe,
        client=client,
        weights=finished.weights,
        classes=site.class_names
        if about.class_names or saying.classes or finished.spec is None
        else _count(spec, site),
        inputs=site.form,
        task=site.task,
        own=_own_weights(recipe, own, trusted),
        published=finished.published if recipe.publishes else None,
    )
    named = update if federation is None else update.telling(federation=federation.agreement.name)
    return SiteUpdate(named, site, None, None, site.remarks)


@dataclass(frozen=True, slots=True)
class _Finished:
    """A network's weights from a file, what the file says, and which network it is, if it tells."""

    weights: Params
    about: About
    spec: Spec | None
    published: Params = field(default_factory=dict)


def _open(path: Path, trusted: Collection[str]) -> _Finished:
    """A file of ours, or plain weights."""
    try:
        packet = read(path)
    except Altered:
        raise
    except Malformed as why:
        raise ConfigError(f"{path} is no safetensors file: {why}; save the network's state dict as one") from why
    if "kind" not in packet.header:
        weights: dict[str, Tensor] = {name: packet.tensors[name] for name in packet.tensors}
        return _Finished(weights, About(), None)
    network, about = load_answering(path, trusted)
    if not isinstance(network, Single):
        raise ConfigError(f"{path} holds several networks; use a file that holds one")
    facts = packet.header.get("facts")
    published = read_memory(facts.get("published") if isinstance(facts, dict) else None)
    return _Finished(network.posterior.mean, about, network.spec, published)


def _agreed_about(federation: FederationFolder) -> About:
    agreed = federation.agreement
    task = task_header(agreed.learns).get("task", "")
    return About(class_names=agreed.output_names, inputs=agreed.inputs, task=task, federation=agreed.name)


def _read_rows(source: str, about: About, saying: Saying, limit: int | None, skip_broken: bool) -> SiteRows:
    task: Task = task_named(about.task or saying.task or CLASSIFICATION.name)
    form, choice = chosen_table(saying.table, task)
    names = about.class_names or saying.classes or None
    return read_site(
        source,
        form=about.inputs or form,
        classes=names,
        limit=limit,
        image_size=saying.image_size,
        skip_broken=skip_broken,
        keep_order=names is None,
        task=task,
        table=choice,
    )


def _name_network(
    path: Path, trusted: Sequence[str], federation: FederationFolder | None, options: dict[str, object], site: SiteRows
) -> Spec:
    """The network that plain weights are of: the one the user names, or the federation's."""
    if not trusted and federation is not None:
        return federation.agreement.spec
    if len(trusted) != 1:
        raise ConfigError(
            f"{path} holds plain weights and does not say of which network; name it once: --model package.module:Class"
        )
    wanted = site.task.outputs(len(site.class_names))
    return spec_with(NameWithOptions(name=trusted[0], **options), site.form.shape, wanted)


def _count(spec: Spec, site: SiteRows) -> int:
    """As many as the network has outputs, for classes; as many as there are targets otherwise."""
    by_network = outputs(Single.of(spec.skeleton(), spec)) if isinstance(site.task, Classification) else None
    return by_network or len(site.class_names)


def _own_weights(recipe: Recipe, own: Path | None, trusted: Collection[str]) -> Params | None:
    """The weights a site trained itself, where a method asks for them."""
    recalls = any(kind.recalls for kind in recipe.evidence)
    if recalls and own is None:
        raise ConfigError(
            f"method {recipe.name!r} with these options fuses the layers that each site trained itself; pass this "
            "site's own update (--own)"
        )
    if own is not None and not recalls:
        raise ConfigError(f"method {recipe.name!r} does not ask for a site's own weights; leave out --own")
    return None if own is None else _open(own, trusted).weights
