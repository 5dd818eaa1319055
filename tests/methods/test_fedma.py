"""FedMA: permuted copies are one network, layer by layer, and options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedfuse.api import recipe as method
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort, Start
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError
from fedfuse.methods.fedma import MatchedLayers, fedma
from fedfuse.nets.channels import permute_group
from fedfuse.server.aggregate.chain import Matcher, hidden_layers
from fedfuse.server.loop import Record, RunPlan, run

CLASSES = 3
MLP = Spec("mlp", {"inputs": 64, "hidden": [8, 7], "classes": CLASSES})
LENET = Spec("lenet", {"size": 8, "maps": [3, 4], "hidden": [6], "classes": CLASSES})
VGG = Spec("vgg11", {"channels": 1, "widths": 0.0625, "hidden": [6], "classes": CLASSES})
PLAIN_VGG = Spec("vgg11", {"channels": 1, "widths": 0.0625, "hidden": [], "norm": False, "classes": CLASSES})
SIDE = {MLP: 8, LENET: 8, VGG: 32, PLAIN_VGG: 32}
BY_MEAN = MatchedLayers(Matcher(gamma=1e-3, shrink=False))


def weights(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Weights drawn as usual, statistics and scales of norms that differ from unit to unit."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    params = {n: t.detach().clone() for n, t in spec.build().state_dict().items()}
    for name, role in spec.layout.roles.items():
        if role in ("norm", "statistic"):
            params[name] = 0.5 + torch.rand(params[name].shape, generator=draw)
    return params


def shuffled(spec: Spec, params: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    for hidden in hidden_layers("test", spec, Bench()):
        params = permute_group(params, hidden.group, torch.randperm(hidden.group.size, generator=draw))
    return params


def cohort(
    spec: Spec, params: Sequence[dict[str, Tensor]], counts: Sequence[list[int]] | None = None
) -> tuple[Cohort, ServerState]:
    labels = counts or [[1, 1, 1]] * len(params)
    updates = [
        ClientUpdate(f"c{k}", Posterior(p), 3.0, 1, spec.with_shapes_of(p), {"counts/labels": torch.tensor(c)})
        for k, (p, c) in enumerate(zip(params, labels, strict=True))
    ]
    return Cohort.of(updates), ServerState(0, Single.of(spec.build(), spec))


@pytest.mark.parametrize("spec", [MLP, LENET, VGG, PLAIN_VGG], ids=["mlp", "lenet", "vgg with norms", "vgg"])
def test_permuted_copies_of_a_network_are_that_network(spec: Spec) -> None:
    original = weights(spec)
    clients, state = cohort(spec, [shuffled(spec, original, k) for k in range(3)])
    fused = BY_MEAN(clients, state, Bench()).single
    x = torch.randn(6, 1, SIDE[spec], SIDE[spec], generator=torch.Generator().manual_seed(1))
    assert fused.spec == spec, "no wider than it was"
    assert torch.allclose(fused.logits(x), spec.forward(original, x), rtol=1e-4, atol=1e-5)


def test_the_prior_shrinks_every_hidden_layer_and_not_the_last() -> None:
    original = weights(LENET)
    clients, state = cohort(LENET, [original] * 3)
    mean = MatchedLayers(Matcher(1e-3, variance=0.5, prior_variance=2.0))(clients, state, Bench()).single.posterior.mean
    for layer in LENET.layout.layers[:-1]:
        assert layer.bias is not None
        assert torch.allclose(mean[layer.weight], original[layer.weight] * 3 / 3.25, atol=1e-6)
        assert torch.allclose(mean[layer.bias], 0.1 + (original[layer.bias] - 0.1) * 3 / 3.25, atol=1e-6)
    assert torch.allclose(mean["classifier.weight"], original["classifier.weight"], atol=1e-6)


def test_the_last_layer_is_averaged_by_shares_of_each_class() -> None:
    a = weights(LENET)
    b = a | {n: a[n] + 1.0 for n in ("classifier.weight", "classifier.bias")}
    clients, state = cohort(LENET, [a, b], [[4, 0, 3], [0, 4, 1]])
    mean = BY_MEAN(clients, state, Bench()).single.posterior.mean
    theirs = torch.tensor([0.0, 1.0, 0.25])  # the second client's share of each class
    assert torch.allclose(mean["classifier.weight"], a["classifier.weight"] + theirs[:, None], atol=1e-6)
    assert torch.allclose(mean["classifier.bias"], a["classifier.bias"] + theirs, atol=1e-6)


def test_networks_that_share_nothing_answer_by_the_mean_of_their_logits() -> None:
    """Kept side by side, unit by unit: the last layer's average is then that of the answers."""
    sizes = [[3, 4], [5, 2]]
    specs = [replace(LENET, options={**LENET.options, "maps": maps}) for maps in sizes]
    params = [weights(spec, k) for k, spec in enumerate(specs)]
    clients, state = cohort(LENET, params)
    apart = MatchedLayers(Matcher(gamma=1e12, shrink=False))(clients, state, Bench())
    assert apart.facts["widths"] == {"conv1": 8, "conv2": 6, "fc1": 12}
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    mean = sum(s.forward(p, x) for s, p in zip(specs, params, strict=True)) / 2
    assert torch.allclose(apart.single.logits(x), mean, atol=1e-5)


def federated(spec: Spec, rounds: int, per_round: int | None = None, clients: int = 3) -> Iterator[Record]:
    draw, side = torch.Generator().manual_seed(0), SIDE[spec]
    rows = {
        f"c{k}": Rows(torch.randn(24, 1, side, side, generator=draw), torch.arange(24) % CLASSES)
        for k in range(clients)
    }
    bench = Bench(
        population=clients,
        classes=CLASSES,
        local=LocalSettings(epochs=1, batch_size=8, optimizer={"lr": 0.05}),
        inputs=InputForm((1, side, side)),
    )
    starts = {c: Start(spec, weights(spec, k)) for k, c in enumerate(rows)}
    state = ServerState(0, Single.of(spec.build(), spec), starts=starts)
    return run(fedma(gamma=100.0), InProcess(Population.of(rows)), bench, None, state, RunPlan(rounds, per_round))


def held(state: ServerState) -> set[str]:
    return {name.rpartition(".")[0] for name in entries_of(state.memory, "held")}


def test_one_layer_is_settled_in_every_exchange_and_then_a_pass_begins_anew() -> None:
    states = [record.state for record in federated(LENET, 5)]
    assert [held(s) for s in states] == [
        {"conv1"},
        {"conv1", "conv2"},
        {"conv1", "conv2", "fc1"},
        set(),
        {"conv1"},
    ]
    assert [s.facts["settled"] for s in states] == [1, 2, 3, 3, 1]
    for earlier, later in [(0, 1), (1, 2), (2, 3)]:
        before, after = (states[i].single.posterior.mean for i in (earlier, later))
        for layer in held(states[earlier]):
            assert after[f"{layer}.weight"].equal(before[f"{layer}.weight"]), "what is settled stays"
    for start in states[0].starts.values():
        common = states[0].single.posterior.mean
        assert start.params["conv1.weight"].equal(common["conv1.weight"])
        assert start.params["conv2.weight"].shape[:2] == (4, len(common["conv1.weight"])), "its own, reading the common"


def test_between_two_exchanges_a_clients_later_layers_are_its_own() -> None:
    """Before training starts, a client's network with the common layer spread out reads what it read."""
    params = [weights(LENET, k) for k in range(2)]
    clients, state = cohort(LENET, params)
    after = MatchedLayers(Matcher(gamma=1e12, shrink=False))(clients, state, Bench())
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for update, own in zip(clients, params, strict=True):
        spec, start = after.starts[update.client]
        assert torch.allclose(spec.forward(start, x), LENET.forward(own, x), atol=1e-5), "nothing was merged"


def test_after_a_pass_clients_start_from_their_own_units() -> None:
    states = [record.state for record in federated(MLP, 3)]
    done = states[-1]
    assert not entries_of(done.memory, "held")
    assert not [name for name in done.memory if name.startswith("places/")]
    common = done.single.posterior.mean
    for client, start in done.starts.items():
        assert start.spec == MLP, "of their own size"
        places = entries_of(states[1].memory, "places/fc1")[client]
        assert start.params["fc1.weight"].equal(common["fc1.weight"][places])


def test_clients_that_come_and_go_get_the_whole_network() -> None:
    states = [record.state for record in federated(MLP, 7, per_round=2, clients=4)]
    assert [s.facts["settled"] for s in states] == [1, 2, 2, 1, 2, 2, 1]
    assert all(t.isfinite().all() for s in states for t in s.single.posterior.mean.values())


def test_norms_are_held_with_their_layer() -> None:
    spec = Spec.of(
        nn.Sequential(
            *(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(3 * 36, 4), nn.ReLU(), nn.Linear(4, CLASSES)),
        )
    )
    SIDE[spec] = 8
    first, second = (record.state for record in federated(spec, 2))
    names = {f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert names <= entries_of(first.memory, "held").keys()
    before, after = first.single.posterior.mean, second.single.posterior.mean
    assert all(after[n].equal(before[n]) for n in names)


def test_other_networks_are_refused_before_training() -> None:
    recipe, seen = fedma(), Bench(inputs=InputForm((1, 8, 8)))
    spec = Spec("resnet18", {"widths": 0.0625})
    with pytest.raises(ConfigError, match="fedma goes layer by layer and model 'resnet18'"):
        recipe.check(1, Bench(), ServerState(0, Single.of(spec.build(), spec)))
    other = {"c1": Start(MLP, weights(MLP))}
    with pytest.raises(ConfigError, match="c1 has 2 hidden layers"):
        recipe.check(1, seen, ServerState(0, Single.of(LENET.build(), LENET), starts=other))
    unseen = Spec.of(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(3, 2)))
    recipe.check(1, Bench(), ServerState(0, Single.of(unseen.build(), unseen)))


def test_clients_train_alike_whatever_the_server_does() -> None:
    assert method("fedma").work(LocalSettings()) == method("pfnm").work(LocalSettings())


@pytest.mark.parametrize("option", ["gamma", "variance", "prior_variance", "sweeps"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 0"):
        method("fedma", **{option: 0})
