"""FedDU and FedAP: eqs. 2 to 5 by hand, and both through the runner."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedfuse
from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.callbacks import Callback
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.run import execute
from fedfuse.methods.fedduap import DynamicUpdate, balance, interpolate, need_of
from fedfuse.nets.cost import pass_flops
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.server.judge import accuracy_and_loss
from fedfuse.server.loop import RunPlan, run
from fedfuse.server.training import divergence
from fedfuse.wire.files import load_model
from fedfuse.wire.messages import encode_reply

CLASSES, RATE = 3, 0.05
SPEC = Spec("mlp", {"inputs": 4, "hidden": [6], "classes": CLASSES})


def rows(n: int, labels: int = CLASSES, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % labels
    return Rows(torch.randn(n, 4, generator=draw) + y[:, None], y)


def start() -> ServerState:
    torch.manual_seed(1)
    return ServerState(3, Single.of(SPEC.build(), SPEC))


def settings(**local: object) -> LocalSettings:
    return LocalSettings.model_validate({"batch_size": 100, "epochs": 5, "optimizer": {"lr": RATE}} | local)


def cohort(*counts: list[int], **local: object) -> Cohort:
    posterior, training = start().single.posterior, settings(**local)
    return Cohort(
        tuple(
            ClientUpdate(
                f"c{i}", posterior, float(sum(n)), 1, SPEC, {"counts/labels": torch.tensor(n)}, training=training
            )
            for i, n in enumerate(counts)
        )
    )


def bench(server: Rows | None = None, population: int = 4, **local: object) -> Bench:
    return Bench(rows(24) if server is None else server, None, population, CLASSES, settings(**local), seed=5)


def test_the_worked_example() -> None:
    """n₀ = n′ = 4000, D(P̄) = 0.2, D(P₀) = 0.3113, acc = 0.4, t = 10: α = 0.2324; of 2000 steps 464.7 count."""
    alpha = need_of(0.4) * balance(4000, 4000, 0.2, 0.3113) * 1.0 * 0.999**10
    assert alpha == pytest.approx(0.2324, abs=5e-5)
    assert alpha * (4000 * 5 / 10) == pytest.approx(464.7, abs=0.05)


def test_the_interpolation_is_equation_two_for_plain_sgd() -> None:
    """w − τ_eff η ḡ with ḡ the mean of the gradients met on the way; all rows in one batch, so their order is none."""
    at, server = bench(), rows(24)
    after = DynamicUpdate()(start(), cohort([20, 0, 0], [5, 5, 0]), at)
    facts = after.facts["server_step"]
    assert facts["taken"]
    assert facts["steps"] == 5

    net = SPEC.build()
    net.load_state_dict(dict(start().single.posterior.mean))
    total = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(5):
        slopes = torch.autograd.grad(F.cross_entropy(net(server.x), server.y), list(net.parameters()))
        for walked, p, g in zip(total, net.parameters(), slopes, strict=True):
            walked += g
            p.data -= RATE * g
    for (name, w), g in zip(start().single.posterior.mean.items(), total, strict=True):
        stepped = w - facts["effective_steps"] * RATE * g / 5
        assert torch.allclose(after.single.posterior.mean[name], stepped, atol=1e-6), name


def test_alpha_is_made_of_accuracy_divergences_and_round() -> None:
    at = bench(rows(24, labels=2))
    told = DynamicUpdate(C=0.5, decay=0.9)(start(), cohort([20, 0, 0], [0, 0, 10]), at).facts["server_step"]
    assert told["accuracy"] == accuracy_and_loss(start().single, rows(24, labels=2))[0]
    trust = balance(24, 30, told["cohort_divergence"], told["server_divergence"])
    assert told["alpha"] == pytest.approx((1 - told["accuracy"]) * trust * 0.5 * 0.9**3)
    other = DynamicUpdate(form="inverse", C=0.1)(start(), cohort([20, 0, 0], [0, 0, 10]), at).facts["server_step"]
    assert other["alpha"] == pytest.approx(trust * 0.1 * 0.999**3 / (told["accuracy"] + 0.01))


def test_a_cohort_like_everybody_leaves_nothing_for_a_one_sided_server() -> None:
    """D(P̄) = 0: α = 0, the model stays, and the guard says so."""
    before = start()
    after = DynamicUpdate()(before, cohort([8, 8, 8]), bench(rows(24, labels=1), population=1))
    assert after.facts["server_step"]["alpha"] == 0
    assert not after.facts["server_step"]["taken"]
    assert after.single is before.single


def test_nobody_any_way_off_is_settled_by_the_numbers_of_rows() -> None:
    told = DynamicUpdate(decay=1.0)(start(), cohort([16, 16, 16]), bench(population=1)).facts["server_step"]
    assert told["alpha"] == pytest.approx((1 - told["accuracy"]) * 24 / (24 + 48))


def test_a_step_that_explodes_is_taken_back() -> None:
    before = start()
    after = DynamicUpdate(explode=1.5)(before, cohort([20, 0, 0], optimizer={"lr": 500.0}), bench())
    facts = after.facts["server_step"]
    assert facts["loss_after"] > 1.5 * facts["loss_before"] or facts["loss_after"] != facts["loss_after"]
    assert not facts["taken"]
    assert after.single is before.single


def test_statistics_take_part_and_counters_stay_whole() -> None:
    start_ = {"v": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    end = {"v": torch.tensor([3.0, 2.0]), "n": torch.tensor(9)}
    mixed = interpolate(start_, end, 0.5)
    assert mixed["v"].tolist() == [2.0, 2.0]
    assert mixed["n"].item() == 9
    assert mixed["n"].dtype == torch.int64


def test_batch_norms_move_with_the_weights() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))
    spec = Spec.of(net)
    state = ServerState(0, Single.of(net, spec))
    told = [replace(u, spec=spec) for u in cohort([20, 0, 0], batch_size=8)]
    after = DynamicUpdate()(state, Cohort(tuple(told)), bench(rows(25))).single.posterior.mean
    assert not after["1.running_mean"].equal(state.single.posterior.mean["1.running_mean"])
    assert after["1.num_batches_tracked"].item() == 5 * 3  # the last batch has one row


def test_the_servers_passes_and_batches_are_its_own() -> None:
    facts = DynamicUpdate(epochs=2, batch_size=5)(start(), cohort([20, 0, 0]), bench()).facts["server_step"]
    assert facts["steps"] == 2 * 5


def federation(server: Rows | None) -> tuple[InProcess, Bench]:
    clients = {f"c{i}": Rows(r.x, torch.full_like(r.y, i)) for i in range(3) for r in [rows(12, seed=i)]}
    return InProcess(Population.of(clients), seed=2), replace(bench(population=3), rows=server)


def test_without_server_rows_it_says_so_before_training() -> None:
    engine, at = federation(None)
    with pytest.raises(RecipeError, match="server's own rows and there are none; set data.server_fraction"):
        next(run(find_method("feddu").recipe(), engine, at, None, replace(start(), round=0), RunPlan(2)))


def test_it_runs_round_after_round_and_the_same_seed_gives_the_same_bytes() -> None:
    def final() -> dict[str, torch.Tensor]:
        engine, at = federation(rows(20))
        *_, last = run(find_method("feddu").recipe(), engine, at, None, replace(start(), round=0), RunPlan(3, 2))
        assert last.facts["facts"]["server_step"]["taken"]
        assert last.facts["reveals"] == ["how many rows of each class the client has"]
        return dict(last.state.single.posterior.mean)

    one, two = final(), final()
    assert all(one[n].equal(two[n]) for n in one)


def test_label_counts_that_do_not_sum_to_the_mass_are_refused() -> None:
    brief = replace(start(), round=0).brief((), CLASSES)
    notes = {"counts/labels": torch.tensor([3, 0, 1])}
    reply = encode_reply(brief, brief.params, notes, num_examples=9.0, steps=1, facts={})
    with pytest.raises(Exception, match="counts/labels is a sum of 4, expected the num_examples 9"):
        admit(Envelope("c0", reply), Contract.of(brief, (LabelCounts(),)))


def test_where_everybody_takes_part_it_says_that_it_is_fedavg() -> None:
    """D(P̄) is zero by the equation; the mean divergence of the clients is not."""
    skewed = cohort([12, 0, 0], [0, 12, 0], [0, 0, 12])
    at = bench(rows(24, labels=2), population=3)
    told = DynamicUpdate()(start(), skewed, at).facts["server_step"]
    assert (told["alpha"], told["taken"]) == (0, False)
    assert "it is FedAvg to the last bit" in told["why"]
    assert DynamicUpdate().remark(3, at) == told["why"]
    assert DynamicUpdate().remark(2, at) == DynamicUpdate(divergence="clients").remark(3, at) == ""
    each = DynamicUpdate(divergence="clients")(start(), skewed, at).facts["server_step"]
    assert each["cohort_divergence"] == pytest.approx(divergence(torch.tensor([1, 0, 0]), torch.ones(3)))
    assert each["taken"]
    weighed = DynamicUpdate(divergence="clients")(start(), cohort([30, 0, 0], [5, 5, 0]), at).facts["server_step"]
    everyone = torch.tensor([35.0, 5.0, 0.0]) + 40 / 2 / 3  # the third was never heard
    want = [divergence(torch.tensor(n), everyone) for n in ([30, 0, 0], [5, 5, 0])]
    assert weighed["cohort_divergence"] == pytest.approx((30 * want[0] + 10 * want[1]) / 40)
    few = DynamicUpdate(least=0.9)(start(), cohort([30, 0, 0]), at).facts["server_step"]
    assert few["why"].startswith("alpha is")


def test_the_servers_work_is_counted() -> None:
    """Two looks at its rows, and three passes per row and epoch of training; one look where no step is taken."""
    few = replace(bench(rows(24, labels=2), population=9), inputs=InputForm((4,)))
    skewed = cohort([30, 0, 0])
    after = DynamicUpdate(epochs=2)(start(), skewed, few).facts
    assert after["server_step"]["taken"]
    one = pass_flops(SPEC, (4,))
    assert after["server_flops"] == (2 * 24 + 3 * 2 * 24) * one
    assert DynamicUpdate(least=2.0)(start(), skewed, few).facts["server_flops"] == 24 * one


METHODS: list[dict[str, Any]] = [
    {"name": "fedavg"},
    {"name": "data_sharing", "most": 20},
    {"name": "hybrid_fl"},
    {"name": "feddu"},
    {"name": "hrank", "at": 1, "rate": 0.5},
    {"name": "fedduap", "at": 2, "lanczos": 6, "sample": 20, "images": 20},
    {"name": "imc", "at": 1, "every": 1, "times": 2, "rule": "fixed", "rate": 0.8},
    {"name": "prunefl", "every": 2, "steps": 3},
]


def experiment(*methods: dict[str, Any], **more: Any) -> Experiment:
    values: dict[str, Any] = {
        "name": "small",
        "rounds": 3,
        "clients_per_round": 2,
        "data": {
            "source": "digits",
            "clients": 4,
            "partition": {"kind": "shards", "per_client": 2},
            "train_limit": 240,
            "test_limit": 60,
            "server_rows": {"count": 40, "classes": 5},
        },
        "model": {"name": "lenet", "maps": [6, 8], "hidden": [12]},
        "local": {"batch_size": 10, "optimizer": {"lr": 0.05}},
        "methods": list(methods) or METHODS,
    }
    return Experiment.model_validate(values | more)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    execute(experiment(), out, workers=0)
    return out


def of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line["method"] == name]


def test_nobody_is_refused_or_dropped(folder: Path) -> None:
    found = lines(folder)
    assert len(found) == 3 * len(METHODS)
    assert not any(line["refused"] or line["dropped"] for line in found)


def test_flops_fall_with_channels_and_not_with_masks(folder: Path) -> None:
    whole = of(folder, "fedavg")
    pruned, masked = of(folder, "hrank"), of(folder, "imc")
    assert pruned[0]["flops"] == whole[0]["flops"]
    assert pruned[1]["flops"] < 0.7 * whole[1]["flops"]
    assert pruned[1]["parameters"] < whole[1]["parameters"]
    assert [line["flops"] for line in masked] == [line["flops"] for line in whole]
    assert masked[-1]["parameters"] == whole[-1]["parameters"]
    assert masked[-1]["weights"] < 0.4 * whole[-1]["weights"]
    assert masked[-1]["bytes_up"] < whole[-1]["bytes_up"]


def test_channels_kept_are_told_layer_by_layer(folder: Path) -> None:
    assert of(folder, "hrank")[0]["channels"] == {"conv1": [3, 6], "conv2": [4, 8]}
    assert "channels" not in of(folder, "fedavg")[0]
    assert set(of(folder, "fedduap")[-1]["channels"]) == {"conv1", "conv2"}


def test_the_spectrums_work_is_told_apart_once(folder: Path) -> None:
    pruned, whole = of(folder, "fedduap"), of(folder, "fedavg")
    looked = [line["curvature_flops"] for line in pruned]
    assert sum(1 for flops in looked if flops) == 1
    at = looked.index(max(looked))
    assert pruned[at]["flops"] - pruned[at]["curvature_flops"] == whole[at]["flops"]
    assert pruned[at]["evidence_flops"] >= pruned[at]["curvature_flops"] > 0 == whole[at]["curvature_flops"]


def test_more_rows_are_more_work(folder: Path) -> None:
    assert of(folder, "data_sharing")[0]["flops"] > of(folder, "fedavg")[0]["flops"]
    assert of(folder, "hybrid_fl")[0]["flops"] == of(folder, "fedavg")[0]["flops"]
    assert of(folder, "hybrid_fl")[0]["server_flops"] > 0 == of(folder, "fedavg")[0].get("server_flops", 0)
    assert "20 labelled rows of the server, given to each of 4 clients" in of(folder, "data_sharing")[0]["reveals"]


def test_a_pruned_model_is_a_file_that_any_process_can_load(folder: Path) -> None:
    (path,) = (folder / "models").glob("fedduap*")
    model, _ = load_model(path)
    assert isinstance(model, Single)
    assert math.isfinite(float(model.logits(torch.rand(2, 1, 8, 8)).sum()))
    assert sum(t.numel() for t in model.posterior.mean.values()) == of(folder, "fedduap")[-1]["parameters"]


def test_sites_with_files_can_use_the_servers_rows_too() -> None:
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = Spec("lenet", {"size": 8, "maps": [4, 6], "hidden": [8], "classes": 3}).build()

    def some(*labels: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tensor(labels).repeat(12 // len(labels))
        return torch.rand(12, 1, 8, 8, generator=draw) + y[:, None, None, None], y

    sites = [fedfuse.local_update(net, some(k), "feddu", client=f"site-{k}", classes=3) for k in range(2)]
    fused = fedfuse.fuse(sites, "feddu", model=net, server_rows=some(0, 1))
    assert fused.facts["server_step"]["taken"], "sites and server have everybody's labels: rows alone decide"
    apart = fedfuse.fuse(sites, "feddu", model=net, server_rows=some(0, 1, 2))
    assert apart.facts["server_step"]["alpha"] == 0, "sites that are everybody need no server with other labels"
    pruned = fedfuse.fuse(sites, fedfuse.recipe("hrank", at=1, rate=0.5), model=net, server_rows=some(0, 1))
    assert fused.module()[0].weight.shape[0] == 4
    assert pruned.module()[0].weight.shape[0] == 2
    with pytest.raises(ConfigError, match="pruned after round 30 and the run ends after 1"):
        fedfuse.fuse(sites, "hrank", model=net, server_rows=some(0, 1))


class Crash(Exception):
    """Power failure."""


class DiesAfter(Callback):
    """A watcher that ends the run after a round."""

    def __init__(self, round_: int) -> None:
        self.round = round_

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        if round_ == self.round:
            raise Crash


@pytest.mark.parametrize("at", [5, 7], ids=["fedduap", "prunefl"])
def test_after_a_crash_it_goes_on_as_if_undisturbed(at: int, folder: Path, tmp_path: Path) -> None:
    chosen = METHODS[at]
    with pytest.raises(Crash):
        execute(experiment(chosen), tmp_path / "cut", workers=0, watch=DiesAfter(2))
    execute(experiment(chosen), tmp_path / "cut", workers=0, resume=True)
    (whole,), (mended,) = (list((f / "models").glob(f"{chosen['name']}*")) for f in (folder, tmp_path / "cut"))
    assert whole.read_bytes() == mended.read_bytes()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"data": {"source": "digits", "clients": 2, "train_limit": 60, "test_limit": 20}}, "there are none"),
        ({"model": {"name": "mlp"}}, "has no convolution whose channels could be removed"),
        ({"rounds": 1}, "pruned after round 2 and the run ends after 1"),
        ({"data": {"source": "digits", "server_rows": {"count": 40, "classes": [3, 99]}}}, "names class 99"),
    ],
)
def test_what_cannot_be_is_said_before_training(said: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, RecipeError), match=words):
        prepare(experiment(METHODS[5], **said)).check()
