from typing import Any

import pytest
import torch
from torch import nn

import fedfuse
from fedfuse.client.kfac import KroneckerFactors
from fedfuse.core.messages import Envelope
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Aggregator, TaskLoss
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import Setting, prepare
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.mean import Mean, mean_of
from fedfuse.server.aggregate.natural import NaturalKron
from fedfuse.server.loop import Record, one_round, run
from fedfuse.server.round import fuse_round
from fedfuse.training.round import client_round


def fedlpa(**options: Any) -> Recipe:
    return find_method("fedlpa").recipe(**options)


def experiment(*methods: dict[str, Any], rounds: int = 1, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": rounds,
        "data": {"clients": 4, "partition": {"kind": "classes", "per_client": 3}, "train_limit": 400},
        "model": {"name": "mlp", "hidden": [12]},
        "local": {"epochs": 3, "batch_size": 16, "optimizer": {"lr": 0.1, "momentum": 0.9}},
        "judge": {"clients": "never"},
    }
    return Experiment(**(settings | {"methods": methods} | changes))


def records(setting: Setting, recipe: Recipe) -> list[Record]:
    engine = InProcess(setting.population, setting.seed)
    return list(run(recipe, engine, setting.bench, setting.judge, setting.start, setting.plan))


def weights(record: Record) -> dict[str, torch.Tensor]:
    return dict(record.state.single.posterior.mean)


def test_by_default_clients_train_as_for_fedavg_so_that_updates_are_shared() -> None:
    recipe = fedlpa()
    assert recipe.objective == TaskLoss()
    assert recipe.evidence == (KroneckerFactors(),)
    assert recipe.aggregate == NaturalKron(1e-1, "trace", "exact", scale="root")
    assert fedlpa(scale="none").aggregate == NaturalKron(1e-3, "trace", "exact")  # λ as it was published
    assert recipe.publishes == ()
    assert fedlpa(damping=0.1, solver="expectation", pi="one").evidence == recipe.evidence


def test_the_clients_choice_of_damping_takes_its_split_along() -> None:
    recipe = fedlpa(damping="evidence")
    assert recipe.evidence == (KroneckerFactors(choose=True),)
    assert recipe.aggregate == NaturalKron("evidence", "evidence")
    assert fedlpa(damping="evidence", pi="trace").aggregate == NaturalKron("evidence", "trace")


@pytest.mark.parametrize("options", [{"damping": 0}, {"damping": "much"}, {"pi": "two"}, {"solver": "cg"}, {"eta": -1}])
def test_impossible_options_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"option {next(iter(options))}"):
        fedlpa(**options)


def test_half_precision_is_of_eigenvectors() -> None:
    with pytest.raises(RecipeError, match="half stores eigenvectors in half precision and there are none; set rank"):
        fedlpa(half=True)
    assert fedlpa(half=True, rank=4).evidence == (KroneckerFactors(rank=4, half=True),)


class Reader(nn.Module):
    """Reads five tokens and tells the class: embedding, attention, norms, a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.classes = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.encoder(self.words(x)).mean(1))


@pytest.mark.parametrize("options", [{}, {"rank": 2, "half": True}, {"sharing": "reduce"}, {"centred": True}])
def test_a_transformer_is_not_averaged_in_disguise(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    spec, recipe = Spec.of(Reader()), fedlpa(min_rows=1, **options)
    state = ServerState(0, Single.of(spec.build(), spec))
    brief, replies = state.brief((), 3), []
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        tokens = torch.randint(12, (40, 5), generator=draw) // (k + 1)
        rows = Rows(tokens, torch.randint(k, 3, (40,), generator=draw))
        work = recipe.work(LocalSettings(epochs=4, batch_size=8, optimizer={"lr": 0.1}))
        replies.append(Envelope(f"site-{k}", client_round(work, brief, f"site-{k}", rows).payload))
    admission = admit_all(replies, brief, recipe.evidence, [f"site-{k}" for k in range(3)])
    assert not admission.refused
    after = fuse_round(recipe, admission.cohort, state, Bench())
    assert after.facts["averaged"] == []
    assert max(after.facts["residual"].values()) <= 1e-8
    plain = mean_of(admission.cohort)
    fused = after.single.posterior.mean
    assert all(not torch.allclose(fused[n], plain[n], atol=1e-4) for n in fused if n != "words.weight")
    seen = fused["words.weight"] - plain["words.weight"]
    assert torch.allclose(seen[0], torch.zeros(8), atol=1e-6)  # nobody learns anything of the token that pads
    assert bool((seen[1:].abs().amax(1) > 1e-5).all())


class Listener(nn.Module):
    """Layers that have no factors: attention to other widths, a norm by root mean squares, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.attend = nn.MultiheadAttention(6, 2, kdim=4, vdim=4, batch_first=True)
        self.norm, self.recur = nn.RMSNorm(6), nn.LSTM(6, 5, batch_first=True)
        self.classes = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attend(self.first(x), x, x, need_weights=False)
        return self.classes(self.recur(self.norm(seen))[0][:, -1])


def test_what_has_no_factors_is_averaged_and_named() -> None:
    torch.manual_seed(0)
    net, sites = Listener(), []
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        rows = Rows(torch.randn(30, 5, 4, generator=draw), torch.randint(3, (30,), generator=draw))
        sites.append(fedfuse.local_update(net, rows, fedlpa(min_rows=1), client=f"s{k}", epochs=2, lr=0.1))
    fused, plain = (fedfuse.fuse(sites, recipe) for recipe in (fedlpa(min_rows=1), "fedavg"))
    named = {name.partition(".")[0] for name in fused.facts["averaged"]}
    assert named == {"attend", "norm", "recur"}
    assert not {n for n in fused.facts["averaged"] if n.startswith(("first", "classes"))}
    means, found = plain.state_dict(), fused.state_dict()
    assert all(torch.allclose(found[n], means[n]) for n in fused.facts["averaged"])
    assert not torch.allclose(found["first.weight"], means["first.weight"], atol=1e-4)


def test_a_split_by_evidence_needs_a_damping_by_evidence() -> None:
    with pytest.raises(RecipeError, match="set damping to 'evidence' too"):
        fedlpa(pi="evidence")


def test_in_one_exchange_it_is_far_above_the_plain_mean_on_skewed_digits() -> None:
    prepared = prepare(
        experiment(
            {"name": "fedlpa"},
            data={"clients": 5, "partition": {"kind": "dirichlet", "alpha": 0.1}},
            model={"name": "mlp", "hidden": [32]},
            local={"epochs": 3, "batch_size": 16, "optimizer": {"lr": 0.05, "momentum": 0.9}},
        )
    )
    setting, recipe = prepared.setting(0), fedlpa(damping="evidence")
    brief, engine = setting.start.brief((), 10), InProcess(setting.population, 0)
    replies = engine.exchange(brief, recipe.work(prepared.local), engine.clients)
    cohort = admit_all(replies, brief, recipe.evidence, engine.clients).cohort

    def accuracy(aggregate: Aggregator) -> float:
        return float(setting.judge.evaluate(aggregate(cohort, setting.start, setting.bench).model)["accuracy"])

    mean = accuracy(Mean())
    assert accuracy(fedlpa().aggregate) > mean + 0.3
    assert accuracy(recipe.aggregate) > mean + 0.3


def test_the_pull_changes_nothing_in_the_first_round_and_something_in_the_second() -> None:
    local = {"epochs": 3, "batch_size": 16, "optimizer": {"lr": 0.1, "momentum": 0.9}, "kernel": "torch"}
    setting = prepare(experiment({"name": "fedlpa"}, rounds=2, local=local)).setting(0)
    plain, pulled = records(setting, fedlpa()), records(setting, fedlpa(eta=1.0))
    assert all(torch.equal(weights(plain[0])[n], t) for n, t in weights(pulled[0]).items())
    assert not torch.equal(weights(plain[1])["fc1.weight"], weights(pulled[1])["fc1.weight"])
    assert plain[1].state.memory == {}
    assert set(pulled[1].state.memory) == {f"kron/{n}/{s}" for n in ("fc1", "classifier") for s in ("in", "out")}
    assert pulled[1].facts["bytes_down"] > pulled[0].facts["bytes_down"]


def test_it_can_hand_over_to_fedavg_after_the_first_exchange() -> None:
    """What the paper recommends for several rounds: FedLPA once, FedAvg after."""
    both = {"name": "fedlpa", "rounds": 1, "then": {"name": "fedavg"}}
    prepared = prepare(experiment(both, rounds=3))
    assert list(prepared.recipes) == ["fedlpa→fedavg"]
    setting = prepared.setting(0)
    first, second, third = records(setting, prepared.recipes["fedlpa→fedavg"])
    alone = records(setting, fedlpa())[0]
    assert all(torch.equal(weights(first)[n], t) for n, t in weights(alone).items())
    assert "residual" in first.facts["facts"]
    assert second.facts["facts"] == {}
    assert second.facts["reveals"] == []
    average = find_method("fedavg").recipe()
    engine = InProcess(setting.population, setting.seed)
    expected = one_round(average, engine, setting.bench, None, first.state, setting.plan)
    assert all(torch.equal(weights(second)[n], t) for n, t in weights(expected).items())
    assert third.state.round == 3
