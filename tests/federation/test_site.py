from pathlib import Path

import pytest
import torch

from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.federation.fusion import fuse_files
from fedfuse.federation.site import site_update
from fedfuse.nets.channels import channel_groups, keep_channels
from fedfuse.wire.codec import decode, fingerprint, read
from fedfuse.wire.files import load_model, save_model


def update(*sets: str, method: str = "fedavg", seed: int = 0, start: Path | None = None, model: str = "mlp"):
    given = ["local.batch_size=16", *sets]
    return site_update("digits", model, method, given, start=start, client="here", limit=60, seed=seed).update


def test_settings_of_model_training_and_method_reach_the_site() -> None:
    made = update("model.hidden=[3]", "local.epochs=2", "method.mu=0.5", method="fedprox")
    header = decode(made.payload).header
    assert header["spec"]["options"]["hidden"] == [3]
    assert header["steps"] == 2 * 4
    assert header["method"] == "fedprox(mu=0.5)"
    assert (header["client"], header["classes"], made.num_examples) == ("here", 10, 60.0)


def test_the_network_fits_the_rows_and_augmentation_is_named() -> None:
    made = update("model.maps=[2,3]", "model.hidden=[4]", 'local.augment=["crop"]', model="lenet")
    assert decode(made.payload).header["spec"]["options"] == {
        "channels": 1,
        "size": 8,
        "classes": 10,
        "maps": [2, 3],
        "hidden": [4],
    }
    plain = update("model.maps=[2,3]", "model.hidden=[4]", model="lenet")
    assert plain.payload != made.payload


def test_the_seed_fixes_start_and_order(tmp_path: Path) -> None:
    assert update().payload == update().payload
    starts = {decode(update(seed=s).payload).header["start"] for s in (0, 1)}
    assert len(starts) == 2
    path = update().save(tmp_path / "start.safetensors")
    assert update(start=path).payload != update().payload
    assert {decode(update(start=path, seed=s).payload).header["start"] for s in (0, 1)} == {
        decode(update(start=path).payload).header["start"]
    }


def test_unknown_words_are_told() -> None:
    with pytest.raises(ConfigError, match="must begin with model., local. or method."):
        update("epochs=1")
    with pytest.raises(ConfigError, match="no key 'local.epoch'; did you mean 'epochs'"):
        update("local.epoch=1")
    with pytest.raises(ConfigError, match="no option 'damping'"):
        update("method.damping=1")


def test_files_are_fused_with_the_methods_options(tmp_path: Path) -> None:
    sites = [update(f"local.epochs={k + 1}", method="fedlpa").telling(client=f"site-{k}") for k in range(2)]
    paths = [site.save(tmp_path / f"{site.about.client}.safetensors") for site in sites]
    weak, strong = (fuse_files(paths, "fedlpa", [f"damping={d}", "pi=one"]) for d in (1e-6, 1e9))
    mean = fuse_files(paths, "fedavg", []).state_dict()
    assert torch.allclose(strong.state_dict()["fc1.weight"], mean["fc1.weight"], atol=1e-5)
    assert not torch.allclose(weak.state_dict()["fc1.weight"], mean["fc1.weight"], atol=1e-4)
    with pytest.raises(ConfigError, match="there is no file"):
        fuse_files([tmp_path / "nobody"], "fedavg", [])
    assert read(paths[0]).header["method"] == "fedlpa"


LENET = ("model.maps=[4,5]", "model.hidden=[6]")


def pruned_file(folder: Path, **options: object) -> Path:
    """A model file of the network that `LENET` names, two of its channels gone."""
    spec = Spec("lenet", {"classes": 10, "channels": 1, "size": 8, "maps": [4, 5], "hidden": [6], **options})
    params = dict(spec.build().state_dict())
    keep = {group: [0, 3] for group in channel_groups(spec, (1, 8, 8)) if group.name == "conv1"}
    small, weights = keep_channels(spec, params, keep)
    save_model(Single(small, Posterior(weights)), folder / "pruned.safetensors")
    return folder / "pruned.safetensors"


def test_a_pruned_start_brings_its_shape(tmp_path: Path) -> None:
    path = pruned_file(tmp_path)
    sites = [update(*LENET, model="lenet", start=path, seed=seed) for seed in (0, 1)]
    header = decode(sites[0].payload).header
    assert header["spec"]["kept"] == {"conv1": [0, 3]}
    assert header["start"] == fingerprint(dict(read(path).tensors))
    paths = [s.telling(client=f"{k}").save(tmp_path / f"{k}.safetensors") for k, s in enumerate(sites)]
    fused = fuse_files(paths, "fedavg")
    assert tuple(fused.state_dict()["conv1.weight"].shape) == (2, 1, 3, 3)
    assert fused.logits(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    again = update(*LENET, model="lenet", start=fused.save(tmp_path / "fused.safetensors"))
    assert decode(again.payload).header["spec"]["kept"] == {"conv1": [0, 3]}


def test_a_pruned_start_of_another_network_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the start does not fit the network 'lenet'"):
        update(*LENET, model="lenet", start=pruned_file(tmp_path, hidden=[7]))
    with pytest.raises(ConfigError, match="the start does not fit the network 'mlp'"):
        update(start=pruned_file(tmp_path))


def test_a_site_says_which_output_are_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "his_nets.py").write_text(PAIR)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="gives a dict with 'size', 'logits', expected logits; say which: output = "):
        update(model="his_nets:Pair")
    path = update("model.output=logits", model="his_nets:Pair").save(tmp_path / "a.safetensors")
    assert read(path).header["spec"] == {"factory": "his_nets:Pair", "options": {}, "output": "logits"}
    fused = fuse_files([path], "fedavg", models=["his_nets:Pair"])
    assert fused.logits(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    saved, _ = load_model(fused.save(tmp_path / "f.safetensors"), ["his_nets:Pair"])
    assert saved.spec.output == "logits"


PAIR = """
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = nn.Linear(64, 10)

    def forward(self, x):
        return {"size": x.size(0), "logits": self.top(x.flatten(1))}
"""


def test_a_site_says_that_nobody_told_it_how_many_examples_there_are() -> None:
    """A prior that is weighed by shares needs their whole; told it, the site trains otherwise and says nothing."""
    common = {"sets": ["local.batch_size=16", "model.hidden=[3]"], "client": "here", "limit": 60}
    alone, told, other = (
        site_update("digits", "mlp", method, all_examples=n, **common)
        for method, n in (("rklb", None), ("rklb", 600), ("fedavg", None))
    )
    assert "so the prior was counted in full; give --all-examples, or use pvi" in " ".join(alone.warnings)
    assert not any("prior" in words for made in (told, other) for words in made.warnings)
    assert alone.update.payload != told.update.payload
