"""The laws all methods share, for methods of other packages too: `check_method("mine")` in a test of yours.

Clients really train, their replies pass the real door, and the cohort is then reordered, made to agree, scaled and
fused again. Which laws a method claims is said by its aggregator's `laws`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedfuse.core.messages import Cohort, Envelope
from fedfuse.core.model import Answering, Model, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.round import check_fused, filter_cohort, fuse_round
from fedfuse.training.round import client_round

_CLIENTS, _FEATURES, _CLASSES = 5, 6, 3
_CLOSE = 1e-5


class LawBroken(AssertionError):
    """A method does not keep a law that it claims."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A cohort that came through the door, and what else an aggregator sees."""

    recipe: Recipe
    cohort: Cohort
    state: ServerState
    bench: Bench

    def fuse(self, cohort: Cohort | None = None) -> ServerState:
        """A round without the server's steps: what the laws are about."""
        filtered, _ = filter_cohort(self.recipe, cohort or self.cohort, self.state, self.bench)
        return self.recipe.aggregate(filtered, self.state, self.bench)

    def outcome(self, cohort: Cohort | None = None) -> dict[str, Tensor]:
        """What becomes of a cohort, as tensors one can compare."""
        return _tensors(self.fuse(cohort).model)


def check_method(name: str, **options: object) -> tuple[str, ...]:
    """Hold a registered method to the laws it claims, and take one whole round of it.

    Args:
        name: the method's name.
        options: of the method.

    Returns:
        The laws that were checked.

    Raises:
        LawBroken: naming the method, the network and the law.
        MethodFault: if its model does not fit the network.

    Example:
        >>> check_method("fedavg")
        ('agree', 'dtype', 'finite', 'one', 'order', 'pure', 'repeat', 'scale')
    """
    recipe = find_method(name).recipe(**options)
    trials = {kind: trial for kind, spec in _networks().items() if (trial := _trial(recipe, spec)) is not None}
    if not trials:
        raise LawBroken(f"method {name!r} fits none of the networks it was tried on: {', '.join(_networks())}")
    for network, trial in trials.items():
        for law in sorted(recipe.laws):
            if not _LAWS[law](trial):
                raise LawBroken(f"method {name!r} on {network} does not keep the law {law!r}: {_LAWS[law].__doc__}")
        fuse_round(recipe, trial.cohort, trial.state, trial.bench)
    return tuple(sorted(recipe.laws))


def _networks() -> dict[str, Spec]:
    plain = Spec("mlp", {"inputs": _FEATURES, "hidden": [7], "classes": _CLASSES})
    norm = nn.Sequential(nn.Linear(_FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, _CLASSES))
    return {"a plain network": plain, "a network with a norm": Spec.of(norm)}


def _rows(seed: int, count: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(count, _FEATURES, generator=draw), torch.randint(_CLASSES, (count,), generator=draw))


def _trial(recipe: Recipe, spec: Spec) -> _Trial | None:
    """A real round up to the aggregator; None where the recipe says it does not fit the network."""
    local, server = LocalSettings(batch_size=8, epochs=2, optimizer=Optimizer(lr=0.1)), _rows(99, 30)
    bench = Bench(server, server.x, _CLIENTS, _CLASSES, local)
    asked = tuple(f"c{i}" for i in range(_CLIENTS))
    draw, weights = torch.Generator().manual_seed(1), spec.skeleton().state_dict()
    start = {n: torch.randn(t.shape, generator=draw) * 0.3 if t.ndim > 1 else t for n, t in weights.items()}
    try:
        state = recipe.begin_round(ServerState(0, Single(spec, Posterior(start))), bench)
        brief = state.brief(recipe.publishes, _CLASSES)
        replies = [client_round(recipe.work(local), brief, c, _rows(i, 11 + 4 * i)) for i, c in enumerate(asked)]
        envelopes = [Envelope(client, reply.reply) for client, reply in zip(asked, replies, strict=True)]
        admission = admit_all(envelopes, brief, recipe.evidence, asked, training=local, trains=recipe.trains)
        trial = _Trial(recipe, admission.cohort, state, bench)
        check_fused(recipe, recipe.aggregate, trial.fuse(), trial.cohort)
    except (RecipeError, ConfigError):
        return None
    if admission.refused:
        raise LawBroken(f"method {recipe.name!r}: the door refuses its own clients: {admission.refused[0]}")
    return trial


def _tensors(model: Model) -> dict[str, Tensor]:
    if isinstance(model, Single):
        return dict(model.posterior.mean)
    if isinstance(model, Answering):
        return {"answer": model.logits(_rows(7, 20).x).log_softmax(-1)}
    return {f"{i}/{n}": t for i, m in enumerate(model.members) for n, t in m.posterior.mean.items()}


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].equal(b[n]) for n in a)


def _close(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    pairs = ((a[n].double(), b[n].double()) for n in a)
    return a.keys() == b.keys() and all(torch.allclose(x, y, rtol=_CLOSE, atol=_CLOSE) for x, y in pairs)


def _keeps_order(trial: _Trial) -> bool:
    """Who answered first does not show in a single bit, and who is called what only in the last ones."""
    updates = trial.cohort.updates
    renamed = [replace(u, client=f"c{i}") for i, u in enumerate(reversed(updates))]
    return _same(trial.outcome(Cohort.of(updates[::-1])), trial.outcome()) and _close(
        trial.outcome(Cohort.of(renamed)), trial.outcome()
    )


def _keeps_one(trial: _Trial) -> bool:
    """One client comes back as it is."""
    update = trial.cohort.updates[0]
    model = trial.fuse(Cohort((update,))).model
    return _close(_tensors(model), _tensors_like(model, Single(update.spec, update.posterior)))


def _keeps_agree(trial: _Trial) -> bool:
    """Clients that agree change nothing."""
    update = trial.cohort.updates[0]
    twins = Cohort(tuple(replace(update, client=f"c{i}", num_examples=1.0 + i) for i in range(3)))
    model = trial.fuse(twins).model
    return _close(_tensors(model), _tensors_like(model, Single(update.spec, update.posterior)))


def _tensors_like(model: Model, single: Single) -> dict[str, Tensor]:
    """One network's tensors, or its answers where the model is compared by its answers."""
    if isinstance(model, Single):
        return dict(single.posterior.mean)
    return {"answer": single.logits(_rows(7, 20).x).log_softmax(-1)}


def _keeps_scale(trial: _Trial) -> bool:
    """Only the ratios of numbers of examples matter."""
    scaled = [replace(u, num_examples=u.num_examples * 3.7) for u in trial.cohort]
    return _close(trial.outcome(Cohort.of(scaled)), trial.outcome())


def _keeps_pure(trial: _Trial) -> bool:
    """What goes in is left as it was, and no global random number is drawn."""
    before, stream = _inputs(trial), torch.random.get_rng_state()
    for tensor in trial.outcome().values():
        tensor.zero_()  # the result shares no memory with its inputs
    return _same(_inputs(trial), before) and bool(torch.random.get_rng_state().equal(stream))


def _inputs(trial: _Trial) -> dict[str, Tensor]:
    seen = {f"start/{n}": t.clone() for n, t in trial.state.single.posterior.mean.items()}
    for u in trial.cohort:
        seen |= {f"{u.client}/{n}": t.clone() for n, t in (*u.posterior.mean.items(), *u.notes.items())}
    return seen


def _keeps_dtype(trial: _Trial) -> bool:
    """What comes in one dtype goes out in it."""

    def wide(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.double() if t.is_floating_point() else t for n, t in params.items()}

    start = trial.state.single
    state = replace(trial.state, model=Single(start.spec, Posterior(wide(start.posterior.mean))))
    updates = [replace(u, posterior=replace(u.posterior, mean=wide(u.posterior.mean))) for u in trial.cohort]
    members = replace(trial, state=state).fuse(Cohort.of(updates)).model.members
    wanted = {n: t.dtype for n, t in updates[0].posterior.mean.items()}
    return all({n: t.dtype for n, t in m.posterior.mean.items()} == wanted for m in members)


def _keeps_finite(trial: _Trial) -> bool:
    """Finite clients make a finite model, however unequal their numbers of examples."""
    uneven = [replace(u, num_examples=10.0 ** (4 * i - 8)) for i, u in enumerate(trial.cohort)]
    return all(bool(t.isfinite().all()) for t in trial.outcome(Cohort.of(uneven)).values())


def _keeps_repeat(trial: _Trial) -> bool:
    """The same seed gives the same bytes."""
    first = {n: t.clone() for n, t in trial.outcome().items()}
    torch.rand(7)  # wherever the global generator stands
    return _same(trial.outcome(), first)


_LAWS: Mapping[str, Callable[[_Trial], bool]] = {
    "agree": _keeps_agree,
    "dtype": _keeps_dtype,
    "finite": _keeps_finite,
    "one": _keeps_one,
    "order": _keeps_order,
    "pure": _keeps_pure,
    "repeat": _keeps_repeat,
    "scale": _keeps_scale,
}
