"""Model files: plain safetensors that rebuild their network, or one sentence why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from fedfuse.core.model import Apart, Single
from fedfuse.core.posterior import Diag, Posterior
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.mixture import MeanProbability, Mixture
from fedfuse.wire.codec import write
from fedfuse.wire.files import load_answering, load_model, save_model

SPEC = Spec("mlp", {"inputs": 3, "hidden": [2], "classes": 2})
X = torch.randn(4, 3)


def single() -> Single:
    return Single.of(SPEC.build(), SPEC)


def test_a_single_network_loads_into_the_users_own_model(tmp_path: Path) -> None:
    model = single()
    size = save_model(model, tmp_path / "m.safetensors", {"accuracy": 0.5})
    assert size == (tmp_path / "m.safetensors").stat().st_size
    module = SPEC.build().eval()
    module.load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"))
    assert module(X).equal(model.logits(X))
    back, facts = load_model(tmp_path / "m.safetensors")
    assert isinstance(back, Single)
    assert back.logits(X).equal(model.logits(X))
    assert facts == {"accuracy": 0.5}


def test_variances_travel_with_their_network(tmp_path: Path) -> None:
    mean = single().posterior.mean
    model = Single(SPEC, Posterior(mean, Diag({n: t.square() for n, t in mean.items()})))
    save_model(model, tmp_path / "m")
    back = load_model(tmp_path / "m")[0]
    assert isinstance(back, Single)
    assert isinstance(back.posterior.geometry, Diag)
    assert all(back.posterior.geometry.variance[n].equal(mean[n].square()) for n in mean)


def test_several_networks_come_back_as_they_were(tmp_path: Path) -> None:
    members = (single(), single())
    mixture = Mixture(members, torch.tensor([0.25, 0.75], dtype=torch.float64), MeanProbability())
    save_model(mixture, tmp_path / "mixture")
    back = load_model(tmp_path / "mixture")[0]
    assert isinstance(back, Mixture)
    assert back.logits(X).equal(mixture.logits(X))
    save_model(Apart(members), tmp_path / "apart")
    apart = load_model(tmp_path / "apart")[0]
    assert isinstance(apart, Apart)
    assert [m.logits(X).equal(n.logits(X)) for m, n in zip(apart.members, members, strict=True)] == [True, True]


def test_a_network_that_is_not_ours_must_be_named_by_the_reader(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    save_model(Single.of(module, Spec("torch.nn:Linear", {"in_features": 3, "out_features": 2})), tmp_path / "m")
    with pytest.raises(ConfigError, match="not named here"):
        load_model(tmp_path / "m")
    back = load_model(tmp_path / "m", trusted={"torch.nn:Linear"})[0]
    assert isinstance(back, Single)
    assert torch.allclose(back.logits(X), module(X))


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"kind": "reply"},
        {"kind": "model"},
        {"kind": "model", "spec": {"factory": "os:system"}},
        {"kind": "model", "spec": SPEC.to_json()},
        {"kind": "model", "members": 3},
        {"kind": "model", "members": [3]},
        {"kind": "model", "members": [], "combine": "os.system", "options": {}, "weights": []},
        {"kind": "model", "members": [], "combine": "MeanProbability", "options": 3, "weights": []},
        {"kind": "model", "members": [], "combine": "MeanProbability", "options": {"x": 1}, "weights": []},
        {"kind": "model", "members": [], "combine": "MeanProbability", "options": {}, "weights": "heavy"},
    ],
)
def test_what_is_no_model_is_one_sentence(header: dict[str, object], tmp_path: Path) -> None:
    write(tmp_path / "m", {"w": torch.ones(1)}, header)
    with pytest.raises(ConfigError) as why:
        load_model(tmp_path / "m")
    assert "\n" not in str(why.value)


def test_a_damaged_or_missing_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"\x80\x04pickle")
    for name in ("m", "nowhere"):
        with pytest.raises(ConfigError, match="is not a model file of fedfuse"):
            load_model(tmp_path / name)


@pytest.mark.parametrize(
    "header", [{"members": []}, {"members": [], "combine": "MeanProbability", "options": {}, "weights": []}]
)
def test_a_model_without_members_is_one_sentence(header: dict[str, object], tmp_path: Path) -> None:
    write(tmp_path / "m", {"w": torch.ones(1)}, {"kind": "model", **header})
    for load in (load_model, load_answering):
        with pytest.raises(ConfigError, match="it names no networks, expected at least one member"):
            load(tmp_path / "m")


def test_whichever_bit_is_flipped_no_other_model_is_loaded(tmp_path: Path) -> None:
    """Weights with a flipped bit were published without a word."""
    path, model, refused = tmp_path / "m", single(), 0
    save_model(model, path, {"round": 3})
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            found, facts = load_model(path)
        except ConfigError:
            refused += 1
        else:  # it stood in the space between two words, or in the name of the checksum
            assert facts["round"] == 3
            assert all(torch.equal(found.posterior.mean[n], t) for n, t in model.posterior.mean.items())
    assert refused > 0.9 * len(range(0, len(whole), 5))
