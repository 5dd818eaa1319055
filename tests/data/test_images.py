from __future__ import annotations

import numpy as np
import pytest
import torch

from fedfuse.data import images, load
from fedfuse.data.stores import Folder, Zip
from fedfuse.errors import ConfigError


def test_class_folders_on_one_level_are_split_in_proportion(tiny, tmp_path):
    tiny.write(tmp_path, {f"cat/{i}.png": tiny.picture_bytes((i, 0, 0), (4, 5)) for i in range(10)})
    tiny.write(tmp_path, {f"dog/{i}.png": tiny.picture_bytes((0, i, 0), (4, 5)) for i in range(5)})
    tiny.write(tmp_path, {"cat/notes.txt": b"no picture", ".hidden/x.png": b"", "readme.md": b""})
    train, test, classes = images.folder_halves(tmp_path)
    assert classes == ("cat", "dog")
    assert np.bincount(train.y).tolist() == [8, 4]
    assert np.bincount(test.y).tolist() == [2, 1]
    assert not set(train.names) & set(test.names)
    rows = train.rows()
    assert rows.x.shape == (12, 3, 5, 4)
    shown = {round(255 * float(x[0, 0, 0])) for x, y in zip(rows.x, rows.y, strict=True) if y == 0}
    assert shown == {int(name[4:-4]) for name in train.names if name.startswith("cat")}


@pytest.mark.parametrize("half", ["test", "val"])
def test_train_and_test_folders_are_taken_as_they_are(tiny, tmp_path, half):
    tiny.write(tmp_path, {f"train/{c}/0.png": tiny.picture_bytes((9, 9, 9), (4, 4)) for c in ("ant", "bee", "cow")})
    tiny.write(tmp_path, {f"{half}/cow/{i}.png": tiny.picture_bytes((9, 9, 9), (4, 4)) for i in range(2)})
    train, test, classes = images.folder_halves(tmp_path)
    assert classes == ("ant", "bee", "cow")
    assert train.y.tolist() == [0, 1, 2]
    assert test.y.tolist() == [2, 2]


def test_a_test_class_without_training_pictures_is_refused(tiny, tmp_path):
    tiny.write(tmp_path, {"train/ant/0.png": tiny.picture_bytes(9), "test/wolf/0.png": tiny.picture_bytes(9)})
    with pytest.raises(ConfigError, match="class 'wolf' without training pictures"):
        images.folder_halves(tmp_path)


def test_grey_pictures_have_one_channel_unless_one_has_colour(tiny, tmp_path):
    tiny.write(tmp_path, {f"a/{i}.png": tiny.picture_bytes(51, (4, 4)) for i in range(4)})
    train, test, _ = images.folder_halves(tmp_path, test_fraction=0.5)
    assert torch.allclose(train.rows().x, torch.full((2, 1, 4, 4), 0.2))
    assert test.rows().x.shape == (2, 1, 4, 4)
    tiny.write(tmp_path, {"a/9.png": tiny.picture_bytes((51, 51, 51), (4, 4))})
    train, _, _ = images.folder_halves(tmp_path, test_fraction=0.5)
    assert train.rows().x.shape[1:] == (3, 4, 4)


def test_pictures_of_different_sizes_need_a_size(tiny, tmp_path):
    tiny.write(
        tmp_path, {"a/0.png": tiny.picture_bytes((51, 0, 0), (4, 4)), "a/1.png": tiny.picture_bytes((51, 0, 0), (6, 4))}
    )
    every, _ = images.class_folders(tmp_path)
    with pytest.raises(ConfigError, match=r"1\.png is 6x4, expected 4x4.*image_size"):
        every.rows()
    sized, _ = images.class_folders(tmp_path, image_size=8)
    assert torch.allclose(sized.rows().x[:, 0], torch.full((2, 8, 8), 0.2))


def test_empty_and_broken_folders_say_why(tiny, tmp_path):
    with pytest.raises(ConfigError, match="holds no folders"):
        images.folder_halves(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ConfigError, match=r"cat holds no pictures"):
        images.folder_halves(tmp_path)
    whole = tiny.picture_bytes((1, 2, 3))
    for broken in (b"", b"no picture", whole[:60]):
        tiny.write(tmp_path, {"cat/0.png": broken})
        with pytest.raises(ConfigError, match=r"cat/0\.png is damaged"):
            images.class_folders(tmp_path)[0].rows()


@pytest.mark.parametrize("packed", [False, True])
def test_tiny_imagenet_is_read_from_folder_and_zip(tiny, tmp_path, packed):
    files = tiny.tiny_imagenet_files()
    if packed:
        (tmp_path / "t.zip").write_bytes(tiny.zip_bytes(files, "tiny-imagenet-200"))
    store = Zip(tmp_path / "t.zip") if packed else Folder(tiny.write(tmp_path, files))
    train, test = images.tiny_imagenet_train(store), images.tiny_imagenet_test(store)
    assert images.tiny_imagenet_classes(store) == ("goldfish", "newt")
    assert train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert test.y.tolist() == [1, 0]  # the annotations name n02000002 first
    assert train.rows().x.shape == (6, 3, 64, 64)  # grey JPEGs become RGB like the rest
    assert float(train.rows().x[5, 0].mean()) == pytest.approx(200 / 255, abs=0.02)
    assert len(train.take(np.array([1])).rows()) == 1


def test_tiny_imagenet_annotations_must_name_known_classes(tiny, tmp_path):
    files = tiny.tiny_imagenet_files() | {"val/val_annotations.txt": b"val_0.JPEG\tn99999999\t0\t0\t1\t1"}
    with pytest.raises(ConfigError, match=r"val_annotations\.txt is damaged.*n99999999"):
        images.tiny_imagenet_test(Folder(tiny.write(tmp_path, files)))
    with pytest.raises(ConfigError, match=r"wnids\.txt is damaged"):
        images.tiny_imagenet_ids(Folder(tiny.write(tmp_path, {"wnids.txt": b"\xff\xfe\x81"})))


@pytest.mark.parametrize("name", ["../../secret.png", "sub/val_0.JPEG", "/etc/hostname", "..", "a\\b.png"])
def test_no_list_of_tiny_imagenet_leads_out_of_its_folder(tiny, tmp_path, name):
    """A picture named `../../secret.png` in the list of validation pictures was read."""
    (tmp_path / "secret.png").write_bytes(tiny.picture_bytes(9))
    files = tiny.tiny_imagenet_files()
    lists = files | {"val/val_annotations.txt": f"{name}\tn01000001\t0\t0\t1\t1".encode()}
    with pytest.raises(ConfigError, match=r"val_annotations\.txt is damaged: .*without folders"):
        images.tiny_imagenet_test(Folder(tiny.write(tmp_path / "a", lists)))
    with pytest.raises(ConfigError, match=r"wnids\.txt is damaged: .*without folders"):
        images.tiny_imagenet_train(Folder(tiny.write(tmp_path / "b", files | {"wnids.txt": name.encode()})))


def test_a_picture_of_too_many_pixels_is_refused_by_its_header(tiny, tmp_path):
    """Ten thousand pixels a side of one colour are a file of some kilobytes and 300 MB of memory."""
    (tmp_path / "huge.png").write_bytes(tiny.picture_bytes(0, (10_000, 10_000)))
    split = images.ImageSplit(Folder(tmp_path), np.array(["huge.png"]), np.array([0]))
    with pytest.raises(ConfigError, match=r"huge\.png is damaged: Image size \(100000000 pixels\) exceeds limit"):
        split.open("huge.png")


def test_loading_decodes_every_picture_once(tiny, tmp_path, monkeypatch):
    tiny.write(tmp_path, {f"{one}/{i}.png": tiny.picture_bytes(10 * i, (4, 4)) for one in "ab" for i in range(5)})
    decoded, decode = [], images.ImageSplit.pixels
    monkeypatch.setattr(images.ImageSplit, "pixels", lambda *given: decoded.append(given[1]) or decode(*given))
    load(str(tmp_path))
    assert len(decoded) == len(set(decoded)) == 10
