"""One place's rows in a given form, classes told by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedfuse.core.inputs import ArrayForm, PictureForm
from fedfuse.data import load
from fedfuse.data.site import read_site
from fedfuse.errors import ConfigError

FORM = PictureForm(height=4, width=4, channels=1)


def picture(path: Path, value: int, size: tuple[int, int] = (4, 4), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(size[::-1], value, np.uint8)).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place, name in enumerate(("ill", "well")):
        for i in range(3):
            picture(tmp_path / "own" / name / f"{i}.png", 51 * (1 + place))
    return tmp_path / "own"


def test_all_rows_of_a_folder_are_read(folder: Path) -> None:
    site = read_site(str(folder))
    assert (len(site), site.counts, site.half) == (6, {"ill": 3, "well": 3}, "")
    assert site.form == FORM
    assert site.names[0] == "ill/0.png"
    assert torch.allclose(site.rows.x[:, 0, 0, 0], torch.tensor([0.2] * 3 + [0.4] * 3))


def test_classes_are_matched_by_name_whatever_their_order(folder: Path) -> None:
    site = read_site(str(folder), classes=("worse", "well", "ill"))
    assert site.counts == {"worse": 0, "well": 3, "ill": 3}
    assert site.rows.y.tolist() == [2, 2, 2, 1, 1, 1]
    (folder / "worse").mkdir()
    assert read_site(str(folder), classes=("worse", "well", "ill")).counts["worse"] == 0
    with pytest.raises(ConfigError, match=r"worse holds no pictures"):
        read_site(str(folder))


def test_a_class_that_should_not_be_there_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="has the class 'well', expected none but ill, wellness; did you mean 'wellness'"
    ):
        read_site(str(folder), classes=("ill", "wellness"))
    picture(folder / "aaa" / "0.png", 1)
    with pytest.raises(ConfigError, match="has the classes 'aaa', 'well', expected none but ill, normal"):
        read_site(str(folder), classes=("ill", "normal"))


def test_pictures_are_brought_to_the_form(folder: Path) -> None:
    picture(folder / "ill" / "rgb.png", 102, (9, 7), "RGB")
    picture(folder / "ill" / "rgba.png", 102, (4, 4), "RGBA")
    picture(folder / "ill" / "palette.gif", 102, (4, 4), "P")
    site = read_site(str(folder), form=FORM)
    assert site.rows.x.shape == (9, 1, 4, 4)
    colour = PictureForm(height=4, width=4, channels=3, mean=(0.2, 0.2, 0.2), std=(0.1, 0.1, 0.1))
    x = read_site(str(folder), form=colour).rows.x
    assert x.shape == (9, 3, 4, 4)
    assert float(x[0].abs().max()) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ConfigError, match=r"come in 2 sizes, 4×4 \(8\), 9×7 \(1\); .* --image-size 4"):
        read_site(str(folder))
    assert read_site(str(folder), image_size=5).form == PictureForm(height=5, width=5, channels=3)


def test_sixteen_bits_a_pixel_keep_their_shades(tmp_path: Path) -> None:
    shades = np.array([[0, 1 << 14], [1 << 15, 65535]], np.uint16)
    (tmp_path / "a").mkdir()
    Image.fromarray(shades).save(tmp_path / "a" / "0.png")
    site = read_site(str(tmp_path), form=PictureForm(height=2, width=2, channels=1), classes=("a", "b"))
    assert torch.allclose(site.rows.x.flatten(), torch.tensor([0.0, 0.25, 0.5, 1.0]), atol=0.01)


def test_broken_pictures_are_told_all_at_once_or_left_out(folder: Path) -> None:
    whole = (folder / "well" / "0.png").read_bytes()
    (folder / "ill" / "0.png").write_text("no picture")
    (folder / "well" / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"2 of 6 pictures .* ill/0.png \(no picture\); well/1.png .*--skip-broken"):
        read_site(str(folder), form=FORM)
    site = read_site(str(folder), form=FORM, skip_broken=True)
    assert (len(site), list(site.broken)) == (4, ["ill/0.png", "well/1.png"])
    assert site.counts == {"ill": 2, "well": 2}
    assert "ill/0.png" not in site.names
    for path in folder.rglob("*.png"):
        path.write_text("")
    with pytest.raises(ConfigError, match="6 of 6 pictures .* no other is left"):
        read_site(str(folder), form=FORM, skip_broken=True)


def test_halves_are_taken_where_a_source_has_them(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "a" / "0.png", 1)
    picture(tmp_path / "val" / "b" / "0.png", 1)
    assert read_site(str(tmp_path), classes=("a", "b")).counts == {"a": 1, "b": 0}
    test = read_site(str(tmp_path), half="test", classes=("a", "b"))
    assert (test.counts, test.half) == ({"a": 0, "b": 1}, "val")
    digits, same = read_site("digits", half="test", limit=20), load("digits", test_limit=20).test
    assert torch.equal(digits.rows.x, same.x)
    assert (digits.half, digits.form) == ("test", ArrayForm(shape=(1, 8, 8)))


def test_arrays_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 1, 0])
    np.savez(path, x=x, y=y, classes=np.array(["well", "ill"]))
    site = read_site(str(path))
    assert site.class_names == ("ill", "well")
    assert site.rows.y.tolist() == [1, 0, 0, 1], "the order in a file does not decide the order of outputs"
    assert read_site(str(path), keep_order=True).rows.y.tolist() == y.tolist()
    scaled = read_site(str(path), form=ArrayForm(shape=(3,), mean=(0.0, 1.0, 2.0), std=(3.0, 3.0, 3.0)))
    assert torch.equal(scaled.rows.x[:, 0], torch.arange(4.0))
    with pytest.raises(ConfigError, match=r"a row of .* is 3, expected 5"):
        read_site(str(path), form=ArrayForm(shape=(5,)))
    np.savez(path, x=x, y=y)
    with pytest.raises(
        ConfigError, match="has the classes '0', '1', expected none but ill, well; name them in an array"
    ):
        read_site(str(path), classes=("ill", "well"))
    np.savez(path, x=x, y=y, classes=np.array(["ill"]))
    with pytest.raises(ConfigError, match="a label is 1 and there are 1 names"):
        read_site(str(path))
    np.savez(path, x_train=x, y_train=y)
    with pytest.raises(ConfigError, match="holds no x and no x_test"):
        read_site(str(path), half="test")


def test_arrays_of_pictures_change_their_channels(tmp_path: Path) -> None:
    path, form = tmp_path / "rows.npz", PictureForm(height=4, width=4, channels=3)
    np.savez(path, x=np.full((2, 4, 4), 51, np.uint8), y=np.array([0, 1]))
    assert torch.allclose(read_site(str(path), form=form).rows.x, torch.full((2, 3, 4, 4), 0.2))
    np.savez(path, x=np.full((2, 3, 4, 4), 51, np.uint8), y=np.array([0, 1]))
    assert torch.allclose(read_site(str(path), form=FORM).rows.x, torch.full((2, 1, 4, 4), 0.2), atol=1e-4)


def test_rows_without_classes(tmp_path: Path, folder: Path) -> None:
    for i in range(2):
        picture(tmp_path / "loose" / f"{i}.png", 51)
    loose = read_site(str(tmp_path / "loose"), classes=("ill", "well"), labelled=False)
    assert (loose.names, loose.labelled) == (("0.png", "1.png"), False)
    assert len(read_site(str(folder), classes=("a", "b"), labelled=False)) == 6
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 2), np.float32))
    assert not read_site(str(tmp_path / "x.npz"), classes=("a", "b"), labelled=False).labelled
    with pytest.raises(ConfigError, match="holds no folders"):
        read_site(str(tmp_path / "loose"), classes=("ill", "well"))


def test_held_out_rows_are_in_proportion(folder: Path) -> None:
    train, held = read_site(str(folder)).split(0.34)
    assert (train.counts, held.counts) == ({"ill": 2, "well": 2}, {"ill": 1, "well": 1})
    assert not set(train.names) & set(held.names)
