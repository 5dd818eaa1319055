"""Mixtures in the hands of users: updates of different networks, one file, and bad input in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedfuse.api import Update, fuse, local_update
from fedfuse.api import recipe as method
from fedfuse.core.model import Single
from fedfuse.core.rng import seeded
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError, QuorumLost, RecipeError
from fedfuse.nets.forward import AtLayer
from fedfuse.nets.mixture import Combine, MeanLogit, MeanProbability, Mixture, OpenSetVote, TopLogit
from fedfuse.server.inputs import common_form
from fedfuse.server.steps.disturb import with_disturbance
from fedfuse.wire.codec import read, write
from fedfuse.wire.files import load_model, save_model

SHALLOW = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})
DEEP = Spec("mlp", {"inputs": 4, "hidden": [6, 6], "classes": 3})
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30) % 3


def site(client: str, spec: Spec) -> Update:
    torch.manual_seed(0)
    return local_update(spec, (X, Y), client=client, seed=ord(client[0]), epochs=1, batch_size=8, lr=0.1)


def mixture(rule: Combine) -> Mixture:
    torch.manual_seed(0)
    members = tuple(Single.of(s.build(), s) for s in (SHALLOW, DEEP, SHALLOW))
    return Mixture(members, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), rule)


def test_updates_of_different_networks_answer_together(tmp_path: Path) -> None:
    files = [site("a", SHALLOW).save(tmp_path / "a.safetensors"), site("c", SHALLOW).save(tmp_path / "c.safetensors")]
    fused = fuse([files[0], site("b", DEEP), files[1]], "ensemble")
    assert isinstance(fused.model, Mixture)
    assert [m.spec for m in fused.model.members] == [SHALLOW, DEEP, SHALLOW]
    expected = sum(m.logits(X).softmax(-1) for m in fused.model.members) / 3
    assert torch.allclose(fused.logits(X).softmax(-1), expected, atol=1e-6)
    one_each = fuse([site("a", SHALLOW), site("b", DEEP)], "ams")
    assert isinstance(one_each.model, Mixture)
    assert one_each.facts["disturbance_inputs"] == "impressions"


def test_methods_of_one_network_still_refuse_the_odd_one() -> None:
    fused = fuse([site("a", SHALLOW), site("b", DEEP), site("c", SHALLOW)], "fedavg")
    assert [r["client"] for r in fused.refused] == ["b"]
    with pytest.raises(QuorumLost, match="no layout is shared by more than half"):
        fuse([site("a", SHALLOW), site("b", DEEP)], "fedavg")


def test_plain_weights_say_nothing_of_their_network() -> None:
    weights = [SHALLOW.build().state_dict() for _ in range(2)]
    with pytest.raises(QuorumLost, match=r"model-1: network is unknown: plain tensors do not say, .* 'ams' can run"):
        fuse(weights, "ams")
    assert fuse(weights, "ams", model=SHALLOW).logits(X).shape == (30, 3)


def test_members_of_different_classes_are_one_sentence() -> None:
    wide = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 4})
    with pytest.raises(ConfigError, match="tell 3 and 4 classes apart; all must have the same ones"):
        fuse([site("a", SHALLOW), site("b", wide)], "ensemble")


def test_distillation_through_python() -> None:
    fused = fuse(
        [site("a", SHALLOW), site("b", DEEP)], method("ensemble", distill="unlabelled", epochs=5), unlabelled=X
    )
    assert fused.module()(X).shape == (30, 3)
    with pytest.raises(RecipeError, match="inputs without labels and there are none"):
        fuse([site("a", SHALLOW)], method("ensemble", distill="unlabelled"))


@pytest.mark.parametrize(
    "rule",
    [
        MeanProbability(),
        MeanLogit(),
        TopLogit(2),
        TopLogit("all", shift=(1.0, 2.0, 3.0), scale=(1.0, 0.5, 2.0)),
        AtLayer(1),
        OpenSetVote(2),
    ],
)
def test_every_rule_and_every_network_survives_a_file(rule: Combine, tmp_path: Path) -> None:
    model = mixture(rule)
    save_model(model, tmp_path / "m.safetensors", {"accuracy": 0.5})
    back, facts = load_model(tmp_path / "m.safetensors")
    assert isinstance(back, Mixture)
    assert back.combine == rule
    assert [m.spec for m in back.members] == [m.spec for m in model.members]
    assert back.logits(X).equal(model.logits(X))
    assert facts == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"members": []}, "it names no networks"),
        ({"weights": [1.0]}, "1 weights were given for 3 members"),
        ({"combine": "eval"}, "no way to combine"),
        ({"combine": "TopLogit", "options": {"k": 0}}, "expected a whole number"),
        ({"combine": "TopLogit", "options": {"colour": 1}}, "not a model file"),
        ({"weights": "many"}, "not a model file"),
    ],
)
def test_damaged_mixtures_are_one_sentence(change: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_model(mixture(MeanProbability()), path)
    packet = read(path)
    tensors = {} if change == {"members": []} else {n: packet.tensors[n] for n in packet.tensors}
    header = {**packet.header, **change, **({"weights": []} if not tensors else {})}
    write(path, tensors, header)  # a liar's file has no checksum
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_nobody_begins_with_a_mixture(tmp_path: Path) -> None:
    path = fuse([site("a", SHALLOW), site("b", DEEP)], "ensemble").save(tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match="holds several networks and sites begin with one"):
        local_update(SHALLOW, (X, Y), start=path)
    with pytest.raises(RecipeError, match="the result is a mixture of networks, not one"):
        fuse([site("a", SHALLOW), site("b", DEEP)], "ensemble").state_dict()


FLAT = Spec("mlp", {"inputs": 64, "hidden": [8], "classes": 3})
PICTURES = Spec("lenet", {"size": 8, "maps": [3, 4], "hidden": [6], "classes": 3})
OWN = Spec.of(nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)))
IMAGES = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def picture_site(client: str, spec: Spec) -> Update:
    with seeded(0, spec.factory):
        begin = spec.build().state_dict()
    x = IMAGES.flatten(1) if spec is OWN else IMAGES
    made = local_update(spec, (x, Y), client="trained", classes=3, start=begin, epochs=1, batch_size=8, lr=0.1)
    return made.telling(client=client)  # a name also seeds the training, which must not differ here


@pytest.mark.parametrize("pair", [(FLAT, PICTURES), (OWN, PICTURES)])
@pytest.mark.parametrize(("name", "options"), [("ams", {}), ("ams", {"layer": "first"}), ("ensemble", {})])
def test_networks_that_read_inputs_otherwise_fuse_in_any_order(
    name: str, options: dict[str, object], pair: tuple[Spec, Spec]
) -> None:
    recipe, model = with_disturbance(method(name, **options)), OWN if OWN in pair else None
    found = []
    for one, other in (pair, pair[::-1]):
        sites = [picture_site(f"{k}-site", spec) for k, spec in enumerate((one, other))]
        fused = fuse(sites, recipe, model=model)
        found.append([fused.logits(x).softmax(-1) for x in (IMAGES, IMAGES.flatten(1))])
        assert fused.facts["disturbance_inputs"] == "impressions"
        assert (fused.facts["members"], "cost" in fused.facts) == (2, True)
    first, second = found
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, second, strict=True))
    assert first[0].equal(first[1])


@pytest.mark.parametrize("pair", [(FLAT, PICTURES), (PICTURES, FLAT)])
def test_a_student_learns_from_networks_that_read_otherwise(pair: tuple[Spec, Spec]) -> None:
    sites = [picture_site(f"{k}-site", spec) for k, spec in enumerate(pair)]
    fused = fuse(sites, method("ensemble", distill="impressions", inputs=20, epochs=1))
    assert fused.facts["distilled"]["inputs"] == 20
    assert fused.logits(IMAGES).shape == (30, 3)


def test_networks_without_a_common_input_cannot_be_asked_together() -> None:
    small = Spec("lenet", {"size": 12, "maps": [3, 4], "hidden": [6], "classes": 3})
    with pytest.raises(RecipeError, match="read inputs of 1×12×12 and 64 have none in common"):
        common_form(Bench(), [FLAT, small])


def test_it_may_end_a_run_of_another_method_and_nothing_may_follow_it() -> None:
    """The ensemble of the last round's clients, beside which a fused network stands in a table of several rounds."""
    plain, mixed = method("fedavg"), method("ensemble")
    plain.then(4, mixed).check(5, Bench(classes=3))
    for recipe, rounds in ((plain.then(3, mixed), 5), (mixed, 2), (mixed.then(1, plain), 2)):
        with pytest.raises(RecipeError, match="let it follow another method in the last round"):
            recipe.check(rounds, Bench(classes=3))
