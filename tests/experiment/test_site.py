from pathlib import Path

import pytest
import torch

from fedfuse.errors import ConfigError
from fedfuse.experiment.site import fuse_files, site_update
from fedfuse.wire.codec import decode, read


def update(*sets: str, method: str = "fedavg", seed: int = 0, start: Path | None = None, model: str = "mlp"):
    return site_update("digits", model, method, ["local.batch_size=16", *sets], start, "here", 60, seed)


def test_settings_of_model_training_and_method_reach_the_site() -> None:
    made = update("model.hidden=[3]", "local.epochs=2", "method.mu=0.5", method="fedprox")
    header = decode(made.payload).header
    assert header["spec"]["options"]["hidden"] == [3]
    assert header["steps"] == 2 * 4
    assert header["method"] == "fedprox(mu=0.5)"
    assert (header["client"], header["classes"], made.mass) == ("here", 10, 60.0)


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
    paths = [update(f"local.epochs={k + 1}", method="fedlpa").save(tmp_path / f"{k}.safetensors") for k in range(2)]
    weak, strong = (fuse_files(paths, "fedlpa", [f"damping={d}", "pi=one"]) for d in (1e-6, 1e9))
    mean = fuse_files(paths, "fedavg", []).state_dict()
    assert torch.allclose(strong.state_dict()["fc1.weight"], mean["fc1.weight"], atol=1e-5)
    assert not torch.allclose(weak.state_dict()["fc1.weight"], mean["fc1.weight"], atol=1e-4)
    with pytest.raises(ConfigError, match="there is no file"):
        fuse_files([tmp_path / "nobody"], "fedavg", [])
    assert read(paths[0]).header["method"] == "fedlpa"
