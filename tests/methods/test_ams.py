"""AMS: the largest logit answers, however logits are made comparable."""

from __future__ import annotations

import pytest
import torch

from builders import drawn
from fedfuse.api import fuse
from fedfuse.api import recipe as method
from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.methods.ams import LogitScale
from fedfuse.nets.mixture import calibration
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode


@pytest.mark.parametrize("k", [1, 2, "all"])
def test_an_input_is_answered_by_the_networks_of_the_largest_logits(k: int | str) -> None:
    """argmax_c Σ_m z_mc over the k networks of largest max_c z_mc: AMS-top1, AMS-topk and AMS-full."""
    spec = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})
    nets, x = [drawn(spec, seed) for seed in range(4)], torch.randn(50, 4)
    z = torch.stack([spec.forward(net, x) for net in nets])
    best = z.amax(2).topk(4 if k == "all" else int(k), dim=0).indices
    answers = z.gather(0, best[..., None].expand(-1, -1, 3)).sum(0)
    fused = fuse(nets, method("ams", k=k), model=spec)
    assert fused.logits(x).argmax(1).equal(answers.argmax(1))


def test_the_same_training_serves_every_rule() -> None:
    settings = LocalSettings()
    plain = method("fedavg").work(settings)
    for options in (
        {},
        {"k": "all"},
        {"layer": "first"},
        {"cover": "answers"},
        {"calibrate": "zscore", "fitted": "server"},
    ):
        assert method("ams", **options).work(settings) == plain
    assert method("ensemble").work(settings) == plain
    assert method("dense").work(settings) == plain


def test_clients_send_only_what_is_needed() -> None:
    assert method("ams").reveals == ()
    sent = {e.name for e in method("ams", cover="classes", calibrate="zscore").evidence}
    assert sent == {"logit_scale", "counts"}


def test_distillation_brings_one_network_back() -> None:
    assert method("ams").result == "mixture"
    assert method("ams", distill="impressions", epochs=3).result == "single"
    assert method("ensemble", distill="unlabelled").needs == {"unlabelled", "network"}


@pytest.mark.parametrize(
    "options",
    [{"k": 0}, {"k": "some"}, {"share": 0.0}, {"share": 1.5}, {"layer": ""}, {"layer": 0}, {"calibrate": "yes"}],
)
def test_bad_options_are_one_sentence(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="method 'ams': option") as caught:
        method("ams", **options)
    assert "\n" not in str(caught.value)


def test_distance_asks_for_moments_and_held_classes_for_counts() -> None:
    assert "second moments" in method("ams", score="mahalanobis", k=2).reveals[0]
    with pytest.raises(ConfigError, match="score 'mahalanobis' needs a network's last layer, and layer = 2"):
        method("ams", layer=2, score="mahalanobis")
    with pytest.raises(RecipeError, match="calibration is of logits that are compared, and Nearest compares none"):
        method("ams", score="mahalanobis", calibrate="zscore")
    held = method("ensemble", distill="impressions", held_classes=True)
    assert [e.name for e in held.evidence] == ["counts"]
    with pytest.raises(ConfigError, match="held_classes is about impressions, and distill is 'server'"):
        method("ams", distill="server", held_classes=True)


def test_a_choice_at_the_first_layer_compares_no_logits() -> None:
    with pytest.raises(RecipeError, match="calibration is of logits that are compared"):
        method("ams", layer="first", calibrate="zscore")


def test_standardized_answers_need_nobodys_rows_and_the_last_layer() -> None:
    recipe = method("ams", k="all", calibrate="answers")
    assert recipe.reveals == ()
    assert recipe.needs == method("ams", k="all").needs
    for options in ({"layer": "first"}, {"score": "mahalanobis"}):
        with pytest.raises(ConfigError, match="answers"):
            method("ams", calibrate="answers", **options)


SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})


@pytest.mark.parametrize("kind", ["temperature", "zscore"])
def test_the_numbers_are_those_of_the_trained_network_on_its_rows(kind: str) -> None:
    torch.manual_seed(0)
    rows = Rows(torch.randn(30, 4), torch.arange(30) % 3)
    evidence = LogitScale(kind, batch=7)  # type: ignore[arg-type]
    brief = Brief(0, SPEC, SPEC.build().state_dict(), classes=3)
    work = Work(LocalSettings(epochs=3, optimizer={"lr": 0.1}), evidence=(evidence,))
    packet = decode(client_round(work, brief, "a", rows).payload)
    trained = {n: t for n, t in packet.tensors.items() if not n.startswith("~")}
    expected = calibration(kind, SPEC.forward(trained, rows.x), rows.y)  # type: ignore[arg-type]
    sent = {n: float(packet.tensors[f"~logit_scale/{n}"]) for n in ("shift", "scale")}
    assert sent == pytest.approx(expected._asdict(), rel=1e-5)
    notes = {n.removeprefix("~"): t for n, t in packet.tensors.items() if n.startswith("~")}
    assert {n: (tuple(t.shape), t.dtype) for n, t in notes.items()} == dict(evidence.expects(brief))
    assert evidence.check(notes, 30.0) is None
    assert evidence.geometry(notes) is None


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 0.0), (0.0, -1.0), (0.0, 1e9), (1e9, 1.0)])
def test_impossible_numbers_are_refused(shift: float, scale: float) -> None:
    notes = {"logit_scale/shift": torch.tensor(shift), "logit_scale/scale": torch.tensor(scale)}
    assert LogitScale().check(notes, 1.0) is not None
