"""FedOV: the objective term by term, destroyed rows, and votes of networks that know what they do not know."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.api import fuse, local_update
from fedfuse.api import recipe as method
from fedfuse.core.messages import Brief
from fedfuse.core.model import Single, outputs
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import RecipeError
from fedfuse.methods import fedov
from fedfuse.methods.fedov import FEATURE_CORRUPTIONS, IMAGE_CORRUPTIONS, OpenSet, make_outliers, with_mixed
from fedfuse.nets.mixture import Mixture
from fedfuse.server.loop import RunPlan, run


def at_work_on(module: nn.Module, classes: int, rows: Rows) -> Local:
    brief = Brief(0, Spec.of(module), {n: t.clone() for n, t in module.state_dict().items()}, classes=classes)
    return Local("a", brief, rows, LocalSettings(), module, {}, seed=3)


def test_the_five_terms_by_hand() -> None:
    """Two classes and "unknown"; one row of each kind, logits chosen so that each term has a closed form."""
    own = torch.tensor([[math.log(2), 0.0, math.log(3)]])
    odd = torch.tensor([[0.0, 0.0, math.log(2)]])
    moved = torch.tensor([[0.0, 0.0, 0.0]])
    mixed = torch.tensor([[0.0, math.log(4), 0.0]])
    y = torch.tensor([0])
    closed = -math.log(2 / 6)  # the true class has 2 of 2 + 1 + 3
    without = -math.log(3 / 4)  # the true class removed: 3 of 1 + 3
    outlier, adversarial = -math.log(2 / 4), -math.log(1 / 3)
    blend = -math.log(1 / 6)
    loss = OpenSet(mix=0.5).loss(torch.cat([own, odd, moved]), mixed, y, torch.tensor([True]))
    assert float(loss) == pytest.approx(closed + without + outlier + adversarial + 0.5 * blend, rel=1e-6)
    alike = OpenSet(mix=0.5).loss(torch.cat([own, odd, moved]), mixed, y, torch.tensor([False]))
    assert float(alike) == pytest.approx(closed + without + outlier + adversarial, rel=1e-6)


def test_only_pairs_of_different_classes_are_mixed() -> None:
    z, mixed = torch.randn(12, 4), torch.randn(4, 4)
    y, differ = torch.tensor([0, 1, 2, 1]), torch.tensor([True, False, True, False])
    extra = OpenSet(mix=1.0).loss(z, mixed, y, differ) - OpenSet(mix=0.0).loss(z, mixed, y, differ)
    expected = F.cross_entropy(mixed[[0, 2]], torch.tensor([3, 3]))
    assert float(extra) == pytest.approx(float(expected), rel=1e-5)


def linear_unknown() -> nn.Sequential:
    """z_unknown = −Σ x, the others 0: the adversary's gradient has a known sign everywhere."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        net[1].weight.zero_()
        net[1].weight[2] = -1.0
        net[1].bias.zero_()
    return net


def test_the_adversary_walks_against_the_unknown() -> None:
    rows = Rows(torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 0, 1]))
    odd = torch.rand(4, 1, 4, 4)
    free = OpenSet(steps=5, stride=0.01, reach=1.0).move_outliers(at_work_on(linear_unknown(), 2, rows), odd)
    assert torch.allclose(free, odd + 0.05, atol=1e-6), "more brightness looks less unknown, five steps of it"
    held = OpenSet(steps=5, stride=0.01, reach=0.02).move_outliers(at_work_on(linear_unknown(), 2, rows), odd)
    assert torch.allclose(held, odd + 0.02, atol=1e-6)
    assert not free.requires_grad


def test_mixed_features_pass_through_the_later_layers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    x, order = torch.randn(8, 4), torch.tensor([2, 0, 1])
    z, mixed = with_mixed(net, x, 3, order, 0.3)
    assert torch.allclose(z, net(x), atol=1e-6)
    h = net[1](net[0](x[:3]))  # what the last but one linear layer reads
    expected = net[4](net[3](net[2](0.3 * h + 0.7 * h[order])))
    assert torch.allclose(mixed, expected, atol=1e-6)


def test_one_pass_serves_batch_norms() -> None:
    """Rows, outliers and moved outliers share one batch, so a norm's statistics are of all of them."""
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 3))
    seen: list[int] = []
    net[0].register_forward_hook(lambda m, args, out: seen.append(len(args[0])) if m.training else None)
    rows = Rows(torch.rand(6, 1, 4, 4), torch.arange(6) % 2)
    OpenSet()(at_work_on(net, 2, rows), (rows.x, rows.y))
    assert seen == [18]


def test_the_whole_loss_is_its_parts() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    rows = Rows(torch.rand(5, 1, 4, 4), torch.tensor([0, 1, 1, 0, 1]))
    at_work, rule = at_work_on(net, 2, rows), OpenSet(mix=0.2)
    got = rule(at_work, (rows.x, rows.y))
    draw = at_work.stream("openset")
    odd = make_outliers(rows.x, draw)
    moved = rule.move_outliers(at_work, odd)
    order, share = torch.randperm(5, generator=draw), float(torch.rand((), generator=draw))
    h = net[2](net[1](rows.x.flatten(1)))
    mixed = net[3](share * h + (1 - share) * h[order])
    z = net(torch.cat([rows.x, odd, moved]))
    assert torch.allclose(got, rule.loss(z, mixed, rows.y, rows.y != rows.y[order]), rtol=1e-5)
    slopes: list[Tensor] = list(torch.autograd.grad(got, list(net.parameters())))
    assert all(s.isfinite().all() for s in slopes)


def test_a_network_without_the_output_is_refused() -> None:
    rows = Rows(torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 1]))
    with pytest.raises(RecipeError, match="a network with 3 outputs has none for the unknown, with 3 classes"):
        OpenSet()(at_work_on(linear_unknown(), 3, rows), (rows.x, rows.y))
    with pytest.raises(RecipeError, match="no linear layer"):
        with_mixed(nn.Conv2d(1, 1, 3), torch.zeros(1, 1, 3, 3), 1, torch.tensor([0]), 0.5)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(60, 2, 9, 12, generator=stream(9)) + 0.1


@pytest.mark.parametrize("way", [*dict.fromkeys(IMAGE_CORRUPTIONS)], ids=lambda w: w.__name__)
def test_every_way_changes_images_and_keeps_their_range(images: Tensor, way: fedov.Corruption) -> None:
    out = way(images, stream())
    assert out.shape == images.shape
    assert out.equal(way(images, stream())), "same generator, same images"
    assert not out.equal(way(images, stream(1)))
    assert out.min() >= 0
    assert out.max() <= images.max() + 1e-4
    assert ((out - images).abs().flatten(1).amax(1) > 1e-3).double().mean() > 0.95


def test_a_tight_crop_magnifies() -> None:
    ramp = torch.arange(32.0).view(1, 1, 1, 32).expand(50, 1, 32, 32)
    out = fedov.tight_crop(ramp, stream())
    steps = out.diff(dim=-1)[:, 0, 16, 8:24]
    magnified = 1 / steps.mean(-1)  # how many pixels one old pixel became
    assert ((magnified > 1.3) & (magnified < 4)).all(), "windows of a tenth to a third, of ratio 3:4 to 4:3"


def test_blur_is_a_mean_over_a_window() -> None:
    spot = torch.zeros(80, 1, 21, 21)
    spot[:, :, 10, 10] = 1.0
    out = fedov.blur(spot, stream())
    assert torch.allclose(out.sum((1, 2, 3)), torch.ones(80), atol=1e-4)
    sides = [(int((o[0] > 1e-6).any(1).sum()), int((o[0] > 1e-6).any(0).sum())) for o in out]
    for tall, wide in sides:
        assert max(tall, wide) in (3, 5, 7, 9)
        assert min(tall, wide) in (1, 3, 5)
    assert len(set(sides)) > 10
    assert torch.allclose(fedov.blur(torch.ones(5, 1, 8, 8), stream()), torch.ones(5, 1, 8, 8), atol=1e-5)


def test_erasing_leaves_half_to_two_thirds(images: Tensor) -> None:
    out = fedov.erase(images, stream())
    gone = (out[:, 0] == 0).double().mean((1, 2))
    assert gone.min() > 0.2
    assert gone.max() < 0.62
    assert out[out != 0].equal(images[out != 0])
    for hole in out[:, 0] == 0:
        rows, columns = hole.any(1).nonzero()[:, 0], hole.any(0).nonzero()[:, 0]
        assert hole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all(), "one rectangle"


def test_cutting_moves_whole_rows_or_columns(images: Tensor) -> None:
    out = fedov.cut_and_paste(images, stream())
    kinds = set()
    for old, new in zip(images[:, 0], out[:, 0], strict=True):
        by_column = (
            [int((old == column[:, None]).all(0).nonzero()[0, 0]) for column in new.T] if _columns(old, new) else []
        )
        by_row = [int((old == row).all(1).nonzero()[0, 0]) for row in new] if not by_column else []
        places = by_column or by_row
        length = len(places)
        moved = [p for i, p in enumerate(places) if p != i]
        kinds.add((bool(by_column), sorted(places) == list(range(length))))
        assert len(moved) >= length // 2
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}, "pasted and swapped, both ways"


def _columns(old: Tensor, new: Tensor) -> bool:
    return all(bool((old == column[:, None]).all(0).any()) for column in new.T)


def test_quarters_are_turned_as_numpy_turns_them() -> None:
    x = torch.rand(40, 1, 8, 8, generator=stream(3))
    out = fedov.rotate_quarters(x, stream())
    turns = set()
    for old, new in zip(x[:, 0].numpy(), out[:, 0].numpy(), strict=True):
        found = [(top, k) for top in range(5) for k in (1, 2, 3) if np.array_equal(_turned(old, top, k), new)]
        assert len(found) == 1
        turns.add(found[0][1])
    assert turns == {1, 2, 3}


def _turned(image: np.ndarray, top: int, k: int) -> np.ndarray:
    out = image.copy()
    for left in (0, 4):
        out[top : top + 4, left : left + 4] = np.rot90(image[top : top + 4, left : left + 4], -k)
    return out


def test_every_image_is_destroyed_in_one_way_of_its_own(images: Tensor) -> None:
    out = make_outliers(images, stream())
    assert out.equal(make_outliers(images, stream()))
    assert not out.equal(images)
    assert images.equal(torch.rand(60, 2, 9, 12, generator=stream(9)) + 0.1), "the rows themselves stay as they are"
    assert IMAGE_CORRUPTIONS.count(fedov.cut_and_paste) == IMAGE_CORRUPTIONS.count(fedov.rotate_quarters) == 2


def test_features_are_erased_or_shuffled() -> None:
    x = torch.rand(50, 10, generator=stream()) + 1
    erased = fedov.erase_features(x, stream())
    assert set((erased == 0).sum(1).tolist()) <= {4, 5}
    shuffled = fedov.shuffle_features(x, stream())
    assert shuffled.sort(1).values.allclose(x.sort(1).values)
    assert ((shuffled != x).sum(1) == 5).all()
    assert make_outliers(x, stream()).shape == x.shape
    assert len(FEATURE_CORRUPTIONS) == 2


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 1, 3, 3)])
def test_other_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RecipeError, match="outliers are made of features or of images"):
        make_outliers(torch.zeros(shape), stream())


SPEC = Spec("mlp", {"inputs": 36, "hidden": [6], "classes": 3})


def rows(seed: int, classes: tuple[int, ...], n: int = 24) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=draw)]
    x = 0.2 * torch.rand(n, 1, 6, 6, generator=draw)
    x[torch.arange(n), 0, 2 * y] += 0.8  # each class lights another line
    return Rows(x, y)


def test_rounds_go_on_after_distillation_with_the_output_put_back() -> None:
    people = Population.of({"a": rows(0, (0, 1)), "b": rows(1, (1, 2))})
    local = LocalSettings(batch_size=8, optimizer={"name": "adam", "lr": 0.01})
    bench = Bench(None, rows(2, (0, 1, 2)).x, 2, 3, local)
    recipe = method("fedov", distill="unlabelled", epochs=2)
    state = ServerState(0, Single.of(SPEC.build(), SPEC))
    states = [r.state for r in run(recipe, InProcess(people), bench, None, state, RunPlan(rounds=2))]
    assert [outputs(s.single) for s in states] == [3, 3]
    assert states[-1].single.spec == SPEC


def test_sites_with_files_only() -> None:
    torch.manual_seed(0)
    updates = [
        local_update(
            SPEC,
            rows(i, classes),
            "fedov",
            client=f"s{i}",
            classes=3,
            epochs=40,
            batch_size=8,
            optimizer={"name": "adam", "lr": 0.02},
        )
        for i, classes in enumerate([(0, 1), (1, 2), (2, 0)])
    ]
    fused = fuse(updates, "fedov")
    assert isinstance(fused.model, Mixture)
    assert not fused.refused
    assert [outputs(m) for m in fused.model.members] == [4, 4, 4]
    test = rows(9, (0, 1, 2), 90)
    assert fused.logits(test.x).shape == (90, 3)
    assert (fused.logits(test.x).argmax(-1) == test.y).double().mean() > 0.8
