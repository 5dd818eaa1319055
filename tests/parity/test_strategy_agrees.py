"""Every method gives the same bytes in process and as a Flower strategy whose clients train with `fedfuse.flower`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
sys.path.insert(0, str(Path(__file__).parent))

from small_runs import LOCAL, SEED, bench, population, rounds_of, start, tensors  # noqa: I001
from fake_grid import Gathering, small_options
from flwr.app import ArrayRecord, Context, Message

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods
from fedfuse.core.seams import ClientsOnly
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.engines.local import InProcess
from fedfuse.errors import RecipeError
from fedfuse.flower import FuseStrategy, train
from fedfuse.server.loop import RunPlan, run


def in_process(recipe: Recipe) -> ServerState:
    *_, last = run(recipe, InProcess(population(), SEED), bench(), None, start(recipe), RunPlan(rounds_of(recipe)))
    return last.state


def grid_of_clients(network: Spec) -> Gathering:
    """A node for every client, registered under its name, with an app of the user's own."""

    def app(message: Message, context: Context) -> Message:
        client = population().clients[int(context.node_config["partition-id"])]
        return train(message, context, network, population().rows_of(client))

    grid = Gathering()
    for place, client in reversed(list(enumerate(population().clients))):
        grid.add(app, client, **{"partition-id": place})
    return grid


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_a_strategy_with_our_clients_gives_the_bytes_of_one_process(name: str) -> None:
    table = {"name": name, **small_options(all_methods()[name])}
    recipe = all_methods()[name].recipe(**small_options(all_methods()[name]))
    first = start(recipe)

    def strategy() -> FuseStrategy:
        return FuseStrategy(
            table, first.single.spec, clients="fedfuse", local=LOCAL, bench=bench(), fraction_evaluate=0
        )

    if recipe.result != "single":
        with pytest.raises(RecipeError, match=f"'{name}' ends a round with"):
            strategy()
    elif not isinstance(recipe.roster, ClientsOnly):
        with pytest.raises(RecipeError, match=f"'{name}' .*roster"):
            strategy()
    else:
        ours, fuses = in_process(recipe), strategy()
        result = fuses.start(
            grid_of_clients(first.single.spec),
            ArrayRecord(dict(first.single.posterior.mean)),  # type: ignore[arg-type]
            num_rounds=rounds_of(recipe),
        )
        theirs = fuses._state
        assert theirs is not None
        assert fuses.admission is not None
        assert (theirs.round, fuses.admission.refused, fuses.admission.dropped) == (ours.round, [], [])
        a, b = tensors(ours), tensors(theirs)
        assert a.keys() == b.keys()
        assert all(a[n].dtype == b[n].dtype and a[n].equal(b[n]) for n in a)
        assert theirs.single.spec == ours.single.spec
        means = [n.removeprefix("net.") for n in ours.single.posterior.mean if not n.endswith("log_variance")]
        assert list(result.arrays) == means  # as the user's own network names them
