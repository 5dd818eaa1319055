"""The public data sets fedfuse knows by name: their files, their addresses, their checksums.

Addresses and MD5 sums are those the authors publish, or, where they publish none, torchvision's
(MNIST from the mirror of the PyTorch project, because the first site no longer serves it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, Self

from fedfuse.core.inputs import UNKNOWN, token_names
from fedfuse.data import formats, images
from fedfuse.data.rows import Array, ArraySplit, Rows, concatenate
from fedfuse.data.stores import Store
from fedfuse.data.table_sources import HOSPITALS, heart_halves
from fedfuse.data.texts import CHARACTERS, PLAY_OPTIONS, PLAYS, read_plays

DIGITS = tuple("0123456789")
Part = tuple[str, ...]
"""Files that only make sense together, such as images and their labels."""

_LARGEST_IDX = 64 * 2**20  # the largest official file, MNIST's training images, has 47 MB


class Split(Protocol):
    """One half of a set as found on disk, before it is limited and turned into tensors."""

    @property
    def y(self) -> Array:
        """The labels."""
        ...

    def __len__(self) -> int: ...

    def take(self, index: Array) -> Self:
        """The rows at these positions."""
        ...

    def rows(self) -> Rows:
        """The rows as tensors."""
        ...


Reader = Callable[..., Split]
"""Reads parts from a store: (store, parts), and by name what a set's options may say."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on the official server and the MD5 sum it must have."""

    name: str
    url: str
    md5: str


@dataclass(frozen=True, slots=True)
class Official:
    """A public data set.

    Attributes:
        name: what the user writes as its source.
        homepage: where a person can fetch it by hand.
        folders: where its files may lie below a search root; downloads go into the first.
        archives: an archive with all the files may lie there instead.
        train: the parts of the training half; a set with some of them missing is partial.
        test: the parts of the test half.
        rows: how many training and test rows the complete set has.
        shape: of one input.
        labels: how many classes there are.
        remotes: what to download.
        read_train: reads the training parts that are there.
        read_test: reads the test parts that are there.
        classes: names the labels, or the tokens of texts.
        options: further keyword arguments of its readers.
        owners: how many hold its rows by nature, 0 where that is not known.
    """

    name: str
    homepage: str
    folders: tuple[str, ...]
    archives: tuple[str, ...]
    train: tuple[Part, ...]
    test: tuple[Part, ...]
    rows: tuple[int, int]
    shape: tuple[int, ...]
    labels: int
    remotes: tuple[Remote, ...]
    read_train: Reader
    read_test: Reader
    classes: Callable[[Store], tuple[str, ...]]
    options: tuple[str, ...] = ()
    owners: int = 0


def _read_idx(store: Store, parts: Sequence[Part]) -> ArraySplit:
    return concatenate(
        [
            formats.parse_idx_pair(
                store.read(pixels, _LARGEST_IDX), store.read(labels, _LARGEST_IDX), store.location / pixels
            )
            for pixels, labels in parts
        ]
    )


def _read_cifar(store: Store, parts: Sequence[Part], label_bytes: int, label_at: int) -> ArraySplit:
    return concatenate(
        [formats.parse_cifar(store.read(n), label_bytes, label_at, store.location / n) for (n,) in parts]
    )


def _read_svhn(store: Store, parts: Sequence[Part]) -> ArraySplit:
    return concatenate([formats.parse_svhn(store.read(name), store.location / name) for (name,) in parts])


def _read_tiny_train(store: Store, _: Sequence[Part]) -> images.ImageSplit:
    return images.tiny_imagenet_train(store)


def _read_tiny_test(store: Store, _: Sequence[Part]) -> images.ImageSplit:
    return images.tiny_imagenet_test(store)


@dataclass(frozen=True, slots=True)
class _FixedNames:
    """Class names that are the same wherever the set lies."""

    names: tuple[str, ...]

    def __call__(self, _store: Store) -> tuple[str, ...]:
        return self.names


@dataclass(frozen=True, slots=True)
class _NamesFromFile:
    """Class names in a text file next to the data, one a line; numbers without that file."""

    file: str
    count: int

    def __call__(self, store: Store) -> tuple[str, ...]:
        names = store.read(self.file).decode("utf-8", "replace").split() if store.has(self.file) else []
        return tuple(names) if len(names) == self.count else tuple(map(str, range(self.count)))


def _mnist_like(name: str, folder: str, base: str, md5: Sequence[str], names: tuple[str, ...], page: str) -> Official:
    files = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    return Official(
        name=name,
        homepage=page,
        folders=(f"{folder}/raw", folder, f"{name}/raw", name),
        archives=(),
        train=(files[:2],),
        test=(files[2:],),
        rows=(60_000, 10_000),
        shape=(1, 28, 28),
        labels=10,
        remotes=tuple(Remote(f"{f}.gz", f"{base}{f}.gz", m) for f, m in zip(files, md5, strict=True)),
        read_train=_read_idx,
        read_test=_read_idx,
        classes=_FixedNames(names),
    )


MNIST = _mnist_like(
    "mnist",
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    DIGITS,
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)

FASHION_MNIST = _mnist_like(
    "fashion-mnist",
    "FashionMNIST",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    "https://github.com/zalandoresearch/fashion-mnist",
)

CIFAR10 = Official(
    name="cifar10",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folders=("cifar10", "cifar-10-batches-bin", "CIFAR10", "cifar-10", "cifar10/cifar-10-batches-bin", ""),
    archives=("cifar-10-binary.tar.gz",),
    train=tuple((f"data_batch_{i}.bin",) for i in range(1, 6)),
    test=(("test_batch.bin",),),
    rows=(50_000, 10_000),
    shape=(3, 32, 32),
    labels=10,
    remotes=(
        Remote(
            "cifar-10-binary.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    read_train=partial(_read_cifar, label_bytes=1, label_at=0),
    read_test=partial(_read_cifar, label_bytes=1, label_at=0),
    classes=_FixedNames(("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")),
)


def _cifar100(name: str, label_at: int, names: str, count: int) -> Official:
    return Official(
        name=name,
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=("cifar100", "cifar-100-binary", "CIFAR100", "cifar-100", "cifar100/cifar-100-binary"),
        archives=("cifar-100-binary.tar.gz",),
        train=(("train.bin",),),
        test=(("test.bin",),),
        rows=(50_000, 10_000),
        shape=(3, 32, 32),
        labels=count,
        remotes=(
            Remote(
                "cifar-100-binary.tar.gz",
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
        read_train=partial(_read_cifar, label_bytes=2, label_at=label_at),
        read_test=partial(_read_cifar, label_bytes=2, label_at=label_at),
        classes=_NamesFromFile(names, count),
    )


SVHN = Official(
    name="svhn",
    homepage="http://ufldl.stanford.edu/housenumbers/",
    folders=("svhn", "SVHN", ""),
    archives=(),
    train=(("train_32x32.mat",),),
    test=(("test_32x32.mat",),),
    rows=(73_257, 26_032),
    shape=(3, 32, 32),
    labels=10,
    remotes=(
        Remote(
            "train_32x32.mat",
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
            "e26dedcc434d2e4c54c9b2d4a06d8373",
        ),
        Remote(
            "test_32x32.mat",
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            "eb5a983be6a315427106f1b164d9cef3",
        ),
    ),
    read_train=_read_svhn,
    read_test=_read_svhn,
    classes=_FixedNames(DIGITS),
)

TINY_IMAGENET = Official(
    name="tiny-imagenet",
    homepage="http://cs231n.stanford.edu/",
    folders=("tiny-imagenet", "tiny-imagenet-200", "tiny-imagenet/tiny-imagenet-200", ""),
    archives=("tiny-imagenet-200.zip",),
    train=(("wnids.txt", "train"),),
    test=(("wnids.txt", "val/val_annotations.txt", "val/images"),),
    rows=(100_000, 10_000),
    shape=(3, 64, 64),
    labels=200,
    remotes=(
        Remote(
            "tiny-imagenet-200.zip",
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
        ),
    ),
    read_train=_read_tiny_train,
    read_test=_read_tiny_test,
    classes=images.tiny_imagenet_classes,
)

_HOSPITAL_FILES = tuple(f"processed.{hospital}.data" for hospital in HOSPITALS)
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
_HOSPITAL_MD5 = (
    "2d91a8ff69cfd9616aa47b59d6f843db",
    "22e96bee155b5973568101c93b3705f6",
    "9a87f7577310b3917730d06ba9349e20",
    "4249d03ca7711e84f4444768c9426170",
)


def _read_hospitals(store: Store, parts: Sequence[Part], half: Literal["train", "test"]) -> ArraySplit:
    halves = heart_halves(store, [name.split(".")[1] for (name,) in parts])
    return halves.train if half == "train" else halves.test


HEART_DISEASE = Official(
    name="heart-disease",
    homepage="https://archive.ics.uci.edu/dataset/45/heart+disease",
    folders=("heart-disease",),
    archives=(),
    train=tuple((name,) for name in _HOSPITAL_FILES),
    test=tuple((name,) for name in _HOSPITAL_FILES),
    rows=(486, 254),
    shape=(13,),
    labels=2,
    remotes=tuple(Remote(n, f"{_UCI}{n}", m) for n, m in zip(_HOSPITAL_FILES, _HOSPITAL_MD5, strict=True)),
    read_train=partial(_read_hospitals, half="train"),
    read_test=partial(_read_hospitals, half="test"),
    classes=_FixedNames(("healthy", "ill")),
    owners=len(_HOSPITAL_FILES),
)

SHAKESPEARE = Official(
    name="shakespeare",
    homepage="https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare",
    folders=("shakespeare", "tinyshakespeare"),
    archives=(),
    train=((PLAYS,),),
    test=((PLAYS,),),
    rows=(10_426, 2_731),
    shape=(80,),
    labels=1 + len(CHARACTERS),
    remotes=(
        Remote(
            PLAYS,
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "6fb458f1232090904fb40fe944165e91",
        ),
    ),
    read_train=partial(read_plays, half="train"),
    read_test=partial(read_plays, half="test"),
    classes=_FixedNames(token_names((UNKNOWN, *CHARACTERS))),
    options=PLAY_OPTIONS,
    owners=10,
)

OFFICIAL: dict[str, Official] = {
    one.name: one
    for one in (
        MNIST,
        FASHION_MNIST,
        CIFAR10,
        _cifar100("cifar100", 1, "fine_label_names.txt", 100),
        _cifar100("cifar100-coarse", 0, "coarse_label_names.txt", 20),
        SVHN,
        TINY_IMAGENET,
        HEART_DISEASE,
        SHAKESPEARE,
    )
}
"""Every public data set by name."""
