from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.core.params import Params
from fedfuse.errors import ConfigError, QuorumLost, RecipeError
from fedfuse.wire.codec import read, write
from fedfuse.wire.files import load_model


class Net(nn.Module):
    """A user's own network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def rows(seed: int, n: int = 24) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=draw)
    return torch.randn(n, 1, 6, 6, generator=draw) + y[:, None, None, None], y


@cache
def update(site: int, method: str = "fedlpa", start: int = 0, n: int = 24, **options: object) -> fedfuse.Update:
    recipe = fedfuse.recipe(method, **options)
    return fedfuse.local_update(
        net(start), rows(site, n), recipe, client=f"site-{site}", classes=3, epochs=2, batch_size=8, lr=0.05
    )


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three update files with Kronecker factors."""
    return [update(k, n=20 + 4 * k).save(tmp_path / f"site-{k}.safetensors") for k in range(3)]


def tampered(path: Path, change: Callable[[dict[str, Tensor], dict[str, object]], None]) -> Path:
    """The file with its tensors or header changed."""
    packet = read(path)
    tensors, header = {n: t.clone() for n, t in packet.tensors.items()}, dict(packet.header)
    change(tensors, header)
    write(path, tensors, header)
    return path


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_methods_are_known_by_name() -> None:
    assert {"fedavg", "fedlpa", "laplace"} <= set(fedfuse.list_methods())
    assert (
        fedfuse.list_methods() == fedfuse.list_methods()
    )  # finding the methods must not hide the function that names them
    assert fedfuse.recipe("fedlpa", damping=0.1).label == "fedlpa(damping=0.1)"
    with pytest.raises(ConfigError, match="'damping'"):
        fedfuse.recipe("fedlpa", dampin=0.1)


@pytest.mark.parametrize("method", ["fedavg", "fedlpa", "laplace"])
def test_files_fuse_as_the_updates_they_came_from(tmp_path: Path, method: str) -> None:
    updates = [update(k, method, n=20 + 4 * k) for k in range(3)]
    paths = [u.save(tmp_path / f"{u.client}.safetensors") for u in updates]
    from_memory = fedfuse.fuse(updates, method, model=net())
    from_disk = fedfuse.fuse(paths, method, model=net())
    assert same(from_memory.state_dict(), from_disk.state_dict())
    assert from_disk.refused == ()
    assert [u.num_examples for u in updates] == [20.0, 24.0, 28.0]


@pytest.mark.parametrize("method", ["fedavg", "fedlpa", "laplace"])
def test_a_fused_file_opens_with_plain_safetensors_in_the_users_own_model(tmp_path: Path, method: str) -> None:
    fused = fedfuse.fuse([update(k, method) for k in range(3)], method, model=net())
    path = fused.save(tmp_path / "global.safetensors")
    mine = Net()
    mine.load_state_dict(safetensors.torch.load_file(path))
    x = rows(9)[0]
    with torch.no_grad():
        assert torch.equal(mine.eval()(x), fused.module()(x))
        assert torch.equal(mine(x), fused.logits(x))
        assert torch.equal(mine(x), fused.module(like=Net())(x))


def test_an_update_says_what_it_reveals_and_gives_its_weights(files: list[Path]) -> None:
    header = read(files[0]).header
    assert header["reveals"] == [
        "second moments of every layer's inputs and gradients, and the mean input of every layer with a bias, averaged "
        "over the client's rows; the last layer's tell which classes it has, an embedding's how often each token occurs"
    ]
    assert (header["client"], header["method"], header["classes"]) == ("site-0", "fedlpa", 3)
    assert update(0, "fedavg").reveals == ()
    assert set(update(0).state_dict()) == set(net().state_dict())


def test_updates_made_for_one_method_can_be_fused_by_another(files: list[Path]) -> None:
    plain = [update(k, "fedavg", n=20 + 4 * k) for k in range(3)]
    found = fedfuse.fuse(files, "fedavg", model=net())
    assert found.refused == ()
    assert same(found.state_dict(), fedfuse.fuse(plain, "fedavg", model=net()).state_dict())
    with pytest.raises(QuorumLost, match="site-0: evidence 'kron' .*--method fedlpa"):
        fedfuse.fuse(plain, "fedlpa", model=net())


def test_a_common_start_can_be_a_file_and_must_fit(tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    safetensors.torch.save_file(net(5).state_dict(), start)
    here = fedfuse.local_update(net(1), rows(0), client="a", start=start, lr=0.05)
    there = fedfuse.local_update(net(5), rows(0), client="a", lr=0.05)
    assert here.payload == there.payload
    assert here == there
    assert hash(here) == hash(there)
    assert here != fedfuse.local_update(net(5), rows(0), client="a", lr=0.1), "another update of the same site"
    with pytest.raises(ConfigError, match="'mlp': body.0.bias is 3 float32"):
        fedfuse.local_update(fedfuse.Spec("mlp"), rows(0), start=net(0).state_dict())
    (tmp_path / "noise").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="noise"):
        fedfuse.local_update(net(), rows(0), start=tmp_path / "noise")
    with pytest.raises(ConfigError, match="file of weights"):
        fedfuse.local_update(net(), rows(0), start=tmp_path / "absent")


def test_methods_that_need_the_start_get_the_right_one() -> None:
    updates = [update(k, "fednova") for k in range(2)]
    with pytest.raises(RecipeError, match="--base"):
        fedfuse.fuse(updates, "fednova", model=net())
    assert fedfuse.fuse(updates, "fednova", model=net(), start=net(0).state_dict()).refused == ()
    with pytest.raises(ConfigError, match="other weights"):
        fedfuse.fuse(updates, "fednova", model=net(), start=net(1).state_dict())
    with pytest.raises(ConfigError, match="start .*body.0.bias is missing"):
        fedfuse.fuse(updates, "fednova", model=net(), start={"w": torch.zeros(1)})


def test_a_network_nobody_named_here_is_not_built(files: list[Path]) -> None:
    with pytest.raises(QuorumLost, match="Net', .*'ensemble'"):
        fedfuse.fuse(files, "ensemble")
    fused = fedfuse.fuse(files, "fedlpa")
    assert same(fused.state_dict(), fedfuse.fuse(files, "fedlpa", model=net()).state_dict())
    assert same(dict(fused.module(like=net()).state_dict()), fused.state_dict())


def test_a_network_that_does_not_fit_is_named(files: list[Path]) -> None:
    with pytest.raises(ConfigError, match="updates .*'mlp': body.0.bias is 3 float32"):
        fedfuse.fuse(files, "fedavg", model=fedfuse.Spec("mlp"))


def test_options_of_a_named_network_come_with_the_updates() -> None:
    """Whoever fuses names the network; how wide it was made stands in the files."""
    spec = fedfuse.Spec("mlp", {"inputs": 36, "hidden": [5], "classes": 3})
    torch.manual_seed(0)
    start = spec.build().state_dict()
    updates = [fedfuse.local_update(spec, rows(k), client=f"s{k}", start=start) for k in range(2)]
    fused = fedfuse.fuse(updates, "fedavg", model=fedfuse.Spec("mlp"))
    assert fused.model.spec == spec
    assert fedfuse.fuse(updates, "fedavg").model.spec == spec


def test_state_dicts_and_modules_are_fused_by_given_masses() -> None:
    a, b = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    assert torch.equal(fedfuse.fuse([a, b], num_examples=[1, 3]).state_dict()["w"], torch.full((2,), 0.75))
    assert torch.equal(fedfuse.fuse([a, b]).state_dict()["w"], torch.full((2,), 0.5))
    found = fedfuse.fuse([net(0), net(1)]).state_dict()
    assert torch.allclose(found["head.bias"], (net(0).head.bias + net(1).head.bias).detach() / 2)
    with pytest.raises(RecipeError, match="model="):
        fedfuse.fuse([a, b]).logits(torch.zeros(1))


def test_given_masses_beat_those_of_the_files(files: list[Path]) -> None:
    weights = [read(p).tensors["head.bias"] for p in files]
    found = fedfuse.fuse(files, num_examples=[1, 1, 2], model=net()).state_dict()["head.bias"]
    assert torch.allclose(found, (weights[0] + weights[1] + 2 * weights[2]) / 4)


@pytest.mark.parametrize("bad", [0.0, -3.0, float("nan"), float("inf")])
def test_an_impossible_mass_is_refused_by_name(bad: float) -> None:
    dicts = [{"w": torch.full((1,), float(k))} for k in range(3)]
    fused = fedfuse.fuse(dicts, num_examples=[1, bad, 1])
    assert [(r["client"], r["field"]) for r in fused.refused] == [("model-2", "num_examples")]
    assert fused.state_dict()["w"].item() == 1.0


def test_nothing_to_fuse_or_the_wrong_things() -> None:
    with pytest.raises(ConfigError, match="nothing to fuse"):
        fedfuse.fuse([])
    with pytest.raises(ConfigError, match="2 numbers of examples .* 1 updates"):
        fedfuse.fuse([{"w": torch.zeros(1)}], num_examples=[1, 2])
    with pytest.raises(ConfigError, match="update 1 .*int"):
        fedfuse.fuse([3])


def nan_factor(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    tensors["~kron/head/out"][1] = float("nan")


def negative_factor(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    tensors["~kron/head/in"][1] += 100.0  # off the diagonal


def giant_factor(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    tensors["~kron/head/in"] *= 1e15


def no_factor(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    del tensors["~kron/body.0/out"]


def odd_factor(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    tensors["~kron/head/out"] = torch.zeros(3, 3)


def no_layer(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    del tensors["head.weight"]


def other_network(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    tensors["head.weight"] = torch.zeros(5, 48)


def other_spec(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    header["spec"] = {"factory": "resnet18", "options": {}}


def other_start(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    header["start"] = "0123456789abcdef"


def odd_round(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    header["round"] = [["deep"]]


def infinite_weight(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    tensors["head.weight"][0, 0] = float("inf")


def escape_code(tensors: dict[str, Tensor], header: dict[str, object]) -> None:
    tensors["\x1b[31mred"] = torch.zeros(1)


FAULTS = {
    nan_factor: ("kron/head/out", "not finite"),
    negative_factor: ("kron/head/in", "not positive semi-definite"),
    giant_factor: ("kron/head/in", "a trace of"),
    no_factor: ("kron/body.0/out", "missing"),
    odd_factor: ("kron/head/out", "3×3 float32"),
    no_layer: ("head.weight", "missing"),
    other_network: ("head.weight", "5×48 float32"),
    other_spec: ("spec", "resnet18"),
    other_start: ("start", "another one than most began with"),
    odd_round: ("round", "deep"),
    infinite_weight: ("head.weight", "not finite"),
    escape_code: ("'\\x1b[31mred'", "1 float32"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_one_bad_file_is_refused_by_name_and_the_others_are_fused(
    files: list[Path], fault: Callable[..., None]
) -> None:
    good = fedfuse.fuse(files[1:], "fedlpa", model=net())
    tampered(files[0], fault)
    fused = fedfuse.fuse(files, "fedlpa", model=net())
    (refusal,) = fused.refused
    field, got = FAULTS[fault]
    assert (refusal["client"], refusal["field"]) == ("site-0", field)
    assert got in refusal["got"]
    assert same(fused.state_dict(), good.state_dict())
    with pytest.raises(QuorumLost, match="2 of 3 .* 90%; site-0: "):
        fedfuse.fuse(files, "fedlpa", model=net(), quorum=0.9)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_refused_by_name(files: list[Path], keep: int) -> None:
    files[2].write_bytes(files[2].read_bytes()[:keep])
    (refusal,) = fedfuse.fuse(files, "fedlpa", model=net()).refused
    assert (refusal["client"], refusal["field"]) == ("site-2", "file")
    for path in files:
        path.write_bytes(b"short")
    with pytest.raises(QuorumLost, match="0 of 3 "):
        fedfuse.fuse(files, "fedlpa", model=net())


def test_two_starts_without_a_majority_cannot_be_fused() -> None:
    with pytest.raises(QuorumLost, match="layout .* site-1: start is"):
        fedfuse.fuse([update(0, start=0), update(1, start=1)], "fedlpa", model=net())


def test_aligned_networks_may_begin_apart_unless_the_start_is_needed() -> None:
    apart = [update(0, "fedavg", start=0), update(1, "fedavg", start=1)]
    fused = fedfuse.fuse(apart, "fedavg", model=net(), align="weights")
    assert fused.refused == ()
    assert not same(fused.state_dict(), fedfuse.fuse([u.state_dict() for u in apart], "fedavg").state_dict())
    with pytest.raises(QuorumLost, match="start is"):
        fedfuse.fuse(apart, "fedavg", model=net())
    with pytest.raises(QuorumLost, match="start is"):
        fedfuse.fuse(apart, "task_arithmetic", model=net(), align="weights", start=net(0).state_dict())


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    unnamed = [update(k, "fedavg").telling(client=None) for k in range(3)]
    paths = [one.save(tmp_path / f"clinic-{k}" / "update.safetensors") for k, one in enumerate(unnamed)]
    tampered(paths[1], infinite_weight)
    (refusal,) = fedfuse.fuse(paths, model=net()).refused
    assert refusal["client"] == str(paths[1])


def test_a_guard_can_stand_before_any_method(files: list[Path]) -> None:
    paths = [*files, *(update(k, n=20 + 4 * k).save(files[0].with_name(f"site-{k}.safetensors")) for k in (3, 4))]
    tampered(files[0], lambda tensors, _: tensors["head.weight"].mul_(1.5))
    fused = fedfuse.fuse(paths, "fedlpa", model=net(), guard="krum", start=net(0).state_dict())
    assert fused.facts["guard_dropped"] == ["site-0"]
    tampered(files[0], lambda tensors, _: tensors["head.weight"].mul_(1e6))
    fused = fedfuse.fuse(paths, "fedlpa", model=net(), guard="krum", start=net(0).state_dict())
    assert [r["client"] for r in fused.refused] == ["site-0"], "so long a move is not even let in"


def test_a_mixture_answers_saves_and_has_no_single_weights(tmp_path: Path) -> None:
    fused = fedfuse.fuse([update(k, "ensemble") for k in range(2)], "ensemble", model=net())
    x = rows(3)[0]
    assert fused.logits(x).shape == (24, 3)
    with pytest.raises(RecipeError, match="distil it"):
        fused.state_dict()
    path = fused.save(tmp_path / "both.safetensors")
    loaded, _ = load_model(path, {f"{Net.__module__}:{Net.__qualname__}"})
    assert torch.allclose(loaded.logits(x), fused.logits(x))


def test_networks_may_differ_where_only_answers_are_fused() -> None:
    small = fedfuse.Spec("mlp", {"inputs": 36, "hidden": [4], "classes": 3})
    large = fedfuse.Spec("mlp", {"inputs": 36, "hidden": [9], "classes": 3})
    updates = [fedfuse.local_update(s, rows(k), "ensemble", client=f"s{k}") for k, s in enumerate((small, large))]
    fused = fedfuse.fuse(updates, "ensemble")
    assert {m.spec for m in fused.model.members} == {small, large}
    with pytest.raises(QuorumLost, match="layout"):
        fedfuse.fuse(updates, "fedavg")


def test_apart_models_have_no_common_answer() -> None:
    fused = fedfuse.fuse([update(k, "local") for k in range(2)], "local", model=net())
    with pytest.raises(RecipeError, match="no common answer"):
        fused.logits(rows(0)[0])


def test_a_fused_state_dict_without_a_network_says_that_it_cannot_run() -> None:
    fused = fedfuse.fuse([{"w": torch.zeros(1, 1)}, {"w": torch.ones(1, 1)}])
    for ask in (fused.module, lambda: fused.logits(torch.zeros(1, 1))):
        with pytest.raises(RecipeError, match="model="):
            ask()
