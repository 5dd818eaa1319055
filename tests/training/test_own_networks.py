"""Users' own networks: they train as their authors wrote them, whatever the method and wherever they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import own_networks as own
import pytest
import torch
import torch.nn.functional as F
from own_networks import CLASSES, OWN, Own
from torch import Tensor, nn

import fedfuse
from builders import initial, payloads, start_of
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.rng import stream
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.engines.local import InProcess, Population
from fedfuse.engines.pool import Pool
from fedfuse.errors import ConfigError, QuorumLost, RecipeError
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.server.judge import Judge
from fedfuse.server.loop import Record, RunPlan, run
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode

METHODS = ("fedavg", "scaffold", "moon", "fedprox", "fednova", "fedlpa", "laplace")
SETTINGS = LocalSettings(batch_size=4, optimizer={"lr": 0.05})


def rows_for(which: Own, n: int = 10, seed: int = 0) -> Rows:
    draw, shape = torch.Generator().manual_seed(seed), (n, *which.shape)
    x = torch.randint(which.tokens, shape, generator=draw) if which.tokens else torch.randn(shape, generator=draw)
    return Rows(x, torch.arange(n) % CLASSES)


def built(which: Own) -> nn.Module:
    torch.manual_seed(0)
    return which.make()


def brief_of(net: nn.Module, output: int | str | None = None) -> Brief:
    spec = Spec.of(net, output)
    return Brief(0, spec, initial(spec), classes=CLASSES)


def two_rounds(name: str, method: str, **options: Any) -> list[Record]:
    which = OWN[name]
    start = start_of(Spec.of(built(which), which.output))
    people = Population.of({client: rows_for(which, seed=i) for i, client in enumerate("abc")})
    bench = Bench(population=3, classes=CLASSES, local=SETTINGS, inputs=InputForm(which.shape))
    judge, recipe = Judge(rows_for(which, 9, seed=9), CLASSES), fedfuse.recipe(method, **options)
    return list(run(recipe, InProcess(people), bench, judge, start, RunPlan(rounds=2)))


def answer_of(net: nn.Module, data: Rows, output: int | str | None = None, **work: Any) -> dict[str, Tensor]:
    answer = client_round(Work(**{"settings": SETTINGS, **work}), brief_of(net, output), "a", data)
    return dict(decode(answer.payload).tensors)


def plain_loop(net: nn.Module, data: Rows) -> dict[str, Tensor]:
    """One epoch as its author would write it."""
    net.train()
    steps = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], SETTINGS.optimizer.lr)
    order = torch.randperm(len(data), generator=stream(0, 0, "a", "order", 0))
    for index in order.split(SETTINGS.batch_size):
        steps.zero_grad()
        x = data.x[index]
        x = x.to(next(net.parameters()).dtype) if x.is_floating_point() else x
        F.cross_entropy(net(x).float(), data.y[index]).backward()
        steps.step()
    return initial(Spec.of(net))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OWN)
def test_every_network_goes_through_every_method(name: str, method: str) -> None:
    options = {"eta": 1.0} if method == "fedlpa" else {}
    last = two_rounds(name, method, **options)[-1]
    begun = built(OWN[name]).state_dict()
    mean = last.state.single.posterior.mean
    assert (len(last.facts["clients"]), last.facts["refused"], last.facts["dropped"]) == (3, [], [])
    assert {n: (t.shape, t.dtype) for n, t in mean.items()} == {n: (t.shape, t.dtype) for n, t in begun.items()}
    assert any(not mean[n].equal(begun[n]) for n in mean)
    assert 0 <= last.facts["accuracy"] <= 1


@pytest.mark.parametrize(
    "name", ["viewed", "backbone", "tied", "tied tokens", "tokens", "recurrent", "bfloat16", "float16", "float64"]
)
def test_it_trains_as_in_its_authors_loop(name: str) -> None:
    which = OWN[name]
    data = rows_for(which)
    mine, theirs = answer_of(built(which), data), plain_loop(built(which), data)
    loose = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(next(built(which).parameters()).dtype, 1e-5)
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[n], theirs[n], rtol=loose, atol=loose) for n in theirs)


def test_every_layer_of_an_encoder_has_factors() -> None:
    told = two_rounds("encoder", "fedlpa")[0].facts["facts"]
    assert not told.get("averaged")
    assert {"layer.linear1", "layer.linear2", "fc"} < set(told["iterations"])
    assert any(name.startswith("layer.self_attn") for name in told["iterations"])


@pytest.mark.parametrize("method", METHODS)
def test_what_its_author_froze_stays(method: str) -> None:
    begun = built(OWN["backbone"]).state_dict()
    mean = two_rounds("backbone", method)[-1].state.single.posterior.mean
    frozen = {n for n, p in own.Backbone().named_parameters() if not p.requires_grad}
    assert frozen == {f"backbone.{n}" for n in ("0.weight", "0.bias", "1.weight", "1.bias")}
    assert {n for n in mean if mean[n].equal(begun[n])} == frozen
    assert int(mean["backbone.1.num_batches_tracked"]) == 6  # its norm counts on, as in the author's loop


@pytest.mark.parametrize("method", ["scaffold", "laplace", "fedlpa", "prunefl", "fedap"])
def test_evidence_is_of_what_trains_and_passes_the_door(method: str) -> None:
    options = {"prunefl": {"every": 1}, "fedap": {"at": 1}}.get(method, {})
    recipe, net = fedfuse.recipe(method, **options), own.Backbone()
    brief = brief_of(net)
    answer = client_round(recipe.work(SETTINGS), brief, "a", rows_for(OWN["backbone"]))
    update = admit(Envelope("a", answer.payload), Contract.of(brief, recipe.evidence))
    assert update.notes
    assert not [n for n in update.notes if "backbone" in n]


def test_a_network_with_nothing_to_train_says_so() -> None:
    net = nn.Linear(6, CLASSES).requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        answer_of(net, rows_for(OWN["tied"]))


def test_what_is_held_for_a_while_trains_again_but_what_is_frozen_does_not() -> None:
    brief, data = brief_of(own.Backbone()), rows_for(OWN["backbone"])
    held = {f"held/head.{name}": torch.ones(()).bool() for name in ("weight", "bias")}
    with pytest.raises(ConfigError, match="nothing to train"):
        client_round(Work(SETTINGS), replace(brief, memory=held), "a", data)
    trained = decode(client_round(Work(SETTINGS), brief, "a", data).payload).tensors
    assert not trained["head.weight"].equal(brief.params["head.weight"])
    assert trained["backbone.0.weight"].equal(brief.params["backbone.0.weight"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["tied", "tied tokens"])
def test_tied_weights_stay_one_tensor_and_the_result_answers(name: str, method: str) -> None:
    pair = ("first.weight", "again.weight") if name == "tied" else ("embed.weight", "out.weight")
    which = OWN[name]
    net = built(which)
    sites = [fedfuse.local_update(net, rows_for(which, seed=i), method, client=f"s{i}") for i in range(3)]
    fused = fedfuse.fuse(sites, method, model=net, start=net.state_dict())
    weights = fused.state_dict()
    assert weights[pair[0]].equal(weights[pair[1]])
    x = rows_for(which, seed=5).x
    assert fused.logits(x).equal(fused.module()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["scaffold", "fedlpa", "laplace", "prunefl", "fedap", "moon"])
def test_networks_of_few_digits_bring_evidence_that_passes_the_door(method: str, dtype: torch.dtype) -> None:
    options = {"prunefl": {"every": 1}, "fedap": {"at": 1}, "fedlpa": {"damping": "evidence"}}
    torch.manual_seed(0)
    net, recipe = own.narrow(dtype), fedfuse.recipe(method, **options.get(method, {}))
    brief = brief_of(net)
    answer = client_round(recipe.work(SETTINGS), brief, "a", rows_for(OWN["bfloat16"], 40))
    update = admit(Envelope("a", answer.payload), Contract.of(brief, recipe.evidence))
    assert all(update.posterior.mean[n].dtype == t.dtype for n, t in net.state_dict().items())


@pytest.mark.parametrize("method", ["laplace", "fedlpa"])
def test_evidence_of_few_digits_is_nearly_that_of_many(method: str) -> None:
    torch.manual_seed(0)
    wide = own.narrow(torch.float32)
    data, recipe = rows_for(OWN["bfloat16"], 40), fedfuse.recipe(method)
    still = LocalSettings(batch_size=40, optimizer={"lr": 1e-9})
    notes = []
    for dtype in (torch.float32, torch.bfloat16):
        net = own.narrow(dtype)
        net.load_state_dict(wide.state_dict())
        told = answer_of(net, data, settings=still, evidence=recipe.evidence)
        notes.append({n: t for n, t in told.items() if n.startswith("~")})
    full, few = notes
    assert full.keys() == few.keys()
    assert all(few[n].dtype == torch.float32 for n in few)
    assert all(float((full[n] - few[n]).norm()) <= 0.1 * float(full[n].norm()) for n in full)


def test_buffers_of_every_kind_travel_and_fuse() -> None:
    before, after = (record.state.single.posterior.mean for record in two_rounds("counting", "fedavg"))
    assert (int(before["calls"]), int(after["calls"])) == (3, 6)
    assert bool((after["seen"] >= before["seen"]).all())
    assert after["small"].equal(torch.arange(3, dtype=torch.uint8))
    assert after["narrow"].equal(torch.ones(2, dtype=torch.float16))


def test_flags_fuse_by_or() -> None:
    seen = [torch.tensor([True, False, False]), torch.tensor([False, False, True])]
    nets = []
    for flags in seen:
        nets.append(own.Counting())
        nets[-1].seen.copy_(flags)
    assert fedfuse.fuse(nets, "fedavg").state_dict()["seen"].tolist() == [True, False, True]


def test_complex_numbers_are_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="'wave' .*complex64"):
        fedfuse.local_update(own.Complex(), rows_for(OWN["tied"]))


@pytest.mark.parametrize(("name", "sentence"), [("tuple", "tuple of"), ("dict", "'logits'"), ("object", "a Said")])
def test_several_outputs_without_a_choice_are_named_before_training(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"{sentence}.*output = "):
        fedfuse.local_update(built(OWN[name]), rows_for(OWN[name]))


def test_a_choice_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="output = 'logit' .*output = 'features'"):
        answer_of(own.InDict(), rows_for(OWN["dict"]), output="logit")
    with pytest.raises(ConfigError, match="output = 0 .*Tensor"):
        answer_of(own.Tied(), rows_for(OWN["tied"]), output=0)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(workers=1) as pool:
        yield pool


@pytest.mark.parametrize("name", ["tuple", "dict", "object", "list"])
def test_a_chosen_output_is_trained_sent_to_workers_and_asked(name: str, pool: Pool) -> None:
    which = OWN[name]
    net, data = built(which), rows_for(which)
    brief = brief_of(net, which.output)
    people = Population.of({"a": data, "b": rows_for(which, seed=1)})
    assert payloads(pool.engine(people), brief, Work(SETTINGS)) == payloads(InProcess(people), brief, Work(SETTINGS))
    fused = fedfuse.fuse([brief.params], model=brief.spec)
    assert fused.logits(data.x).equal(net.fc(F.relu(net.body(data.x))))  # type: ignore[operator]


def test_trainable_names_are_the_authors() -> None:
    assert Spec.of(own.Backbone()).layout.trainable == ("head.weight", "head.bias")
    assert Spec.of(own.TiedTokens()).layout.trainable == ("embed.weight", "mix.weight", "mix.bias")


def test_rows_that_a_network_cannot_read_are_told_in_its_words() -> None:
    people = Population.of({"a": Rows(torch.randn(6, 5), torch.arange(6) % CLASSES)})
    start, bench = start_of(Spec.of(own.Tied())), Bench(classes=CLASSES)
    rounds = run(fedfuse.recipe("fedavg"), InProcess(people), bench, None, start, RunPlan())
    with pytest.raises(QuorumLost, match="mat1 and mat2"):
        next(rounds)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["weights", "activations", "transport", "graph"])
@pytest.mark.parametrize("name", [n for n in OWN if not n.startswith("tied")])
def test_every_network_is_aligned_and_still_answers(name: str, way: str) -> None:
    which = OWN[name]
    net = built(which)
    sites = [fedfuse.local_update(net, rows_for(which, seed=i), client=f"s{i}", output=which.output) for i in range(2)]
    model, rows = Spec.of(net, which.output), rows_for(which, 9, seed=5)
    fused = fedfuse.fuse(sites, model=model, align=way, server_rows=rows)
    assert fused.logits(rows.x).shape == (9, CLASSES)
    alone = fedfuse.fuse(sites[:1], model=model, align=way, server_rows=rows)
    assert all(alone.state_dict()[n].equal(t) for n, t in sites[0].state_dict().items())


def one_round(name: str, method: str, **options: Any) -> Record:
    """One round with server rows and inputs without labels."""
    which = OWN[name]
    people = Population.of({client: rows_for(which, seed=i) for i, client in enumerate("ab")})
    held = {"rows": rows_for(which, 12, seed=8), "unlabelled": rows_for(which, 12, seed=9).x}
    bench = Bench(**held, population=2, classes=CLASSES, local=SETTINGS, inputs=InputForm(which.shape))  # type: ignore[arg-type]
    start = start_of(Spec.of(built(which), which.output))
    return next(run(fedfuse.recipe(method, **options), InProcess(people), bench, None, start, RunPlan()))


def test_the_curvature_of_attention_has_second_derivatives() -> None:
    facts = one_round("encoder", "imc", at=1, every=1, times=1, lanczos=3).facts
    assert (facts["dropped"], facts["refused"]) == ([], [])


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64", "viewed"])
def test_channels_of_any_network_can_be_pruned(name: str) -> None:
    record = one_round(name, "hrank", at=1, rate=0.5, images=8)
    first = record.state.single.posterior.mean["conv.weight" if name == "viewed" else "0.weight"]
    assert (len(first), first.dtype) == (2, next(built(OWN[name]).parameters()).dtype)
    assert record.state.single.logits(rows_for(OWN[name]).x).shape == (10, CLASSES)


@pytest.mark.parametrize(
    ("name", "method", "sentence"),
    [
        ("transposed", "fedma", "plain layer"),
        ("tokens", "dense", "whole numbers"),
        ("tokens", "fedov", "whole numbers"),
        ("encoder", "fedov", "mixed features"),
    ],
)
def test_what_a_method_cannot_do_for_a_network_is_one_sentence(name: str, method: str, sentence: str) -> None:
    with pytest.raises((RecipeError, ConfigError), match=sentence):
        one_round(name, method)


def test_a_network_that_reads_tokens_can_be_distilled_on_rows() -> None:
    facts = one_round("tokens", "ensemble", distill="server", epochs=1).facts["facts"]
    assert facts["distilled"]["inputs"] == 12


def test_a_student_keeps_what_its_author_froze() -> None:
    state = one_round("backbone", "ensemble", distill="server", epochs=2).state
    begun = built(OWN["backbone"]).state_dict()
    moved = {n for n, t in state.single.posterior.mean.items() if not t.equal(begun[n])}
    assert moved == {"head.weight", "head.bias", *(f"backbone.1.{n}" for n in STATISTICS)}


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
