"""Structure-aware mutants: well-formed replies of every method, and files of every kind, each spoilt in one place.

A mutant changes what a field means and not only its bytes: a factor's scale, sign, symmetry or spectrum, a variance's
exponent, a number of a header. What becomes of it is one of three: somebody refuses it by name (or weakens it), it is
harmless, or something foreign happens, which never may.
"""

from __future__ import annotations

import gzip
import io
import math
import random
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from scipy.io import savemat
from torch import Tensor

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods, find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data import formats, images
from fedfuse.data.stores import Folder
from fedfuse.errors import FuseError
from fedfuse.experiment.results import Ledger
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.round import fuse_admitted
from fedfuse.training.round import client_round
from fedfuse.wire.codec import Packet, decode, encode
from fedfuse.wire.files import load_model, save_model

Fate = Literal["refused", "harmless", "foreign"]
CLIENTS, CLASSES, LIAR = 6, 3, "c5"
LOCAL = LocalSettings(batch_size=8, optimizer={"lr": 0.05})
SMALL = {"epochs": 1, "steps": 1, "batch": 8, "latent": 4, "width": 4, "at": 1, "every": 1, "times": 1, "features": 8}
SMALL |= {"sweeps": 2}
FEW_CHOICES = {"pfnm": {"gamma": (1.0, 50.0), "variance": (1.0,), "prior_variance": (10.0,)}}  # of 18 that it tries
UNFIT = frozenset({"hybrid_fl", "data_sharing", "prunefl"})  # their clients send no more than FedAvg's do
METHODS = sorted(set(all_methods()) - UNFIT)
FACTORS = (0.0, -1.0, 1e-30, 1e-6, 0.01, 0.5, 2.0, 10.0, 1e3, 1e6, 1e12, 1e20, 1e30, 1e37, -1e6, math.nan, math.inf)
HUGE = (1e300, 10**400, -(10**400), 2**53, math.nan, math.inf)
NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 0.5, 1e-9, 7, 1e3, 1e9, 1e12, *HUGE, None, "8", [])


def rows(seed: int, n: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    return Rows(torch.rand(n, 6, generator=draw) + 0.3 * y[:, None], y)


@cache
def world(method: str) -> tuple[Recipe, ServerState, Bench, Brief, dict[str, bytes]]:
    """A method's federation after everybody has answered honestly."""
    known = find_method(method).schema.model_fields
    recipe = find_method(method).recipe(**{k: v for k, v in SMALL.items() if k in known}, **FEW_CHOICES.get(method, {}))
    spec = Spec("mlp", {"inputs": 6, "hidden": [5], "classes": CLASSES})
    torch.manual_seed(0)
    bench = Bench(rows(99, 12), rows(98, 12).x, CLIENTS, CLASSES, LOCAL, 0)
    state = recipe.begin_round(ServerState(0, Single.of(spec.build(), spec)), bench)
    brief = state.brief(recipe.publishes, CLASSES)
    work = recipe.work(LOCAL)
    sent = {f"c{k}": client_round(work, brief, f"c{k}", rows(k, 16)).payload for k in range(CLIENTS)}
    return recipe, state, bench, brief, sent


# Replies

Draft = tuple[dict[str, Tensor], dict[str, Any]]
Mutator = Callable[[random.Random, Draft], Draft]


def _choose(chance: random.Random, tensors: dict[str, Tensor], square: bool = False) -> str:
    """A tensor's name, evidence as often as weights."""
    fit = [n for n, t in tensors.items() if t.numel() and (not square or _is_square(t))]
    notes = [n for n in fit if n.startswith("~")]
    return chance.choice(notes if notes and chance.random() < 0.6 else fit or list(tensors))


def _is_square(tensor: Tensor) -> bool:
    return tensor.ndim >= 2 and tensor.shape[-1] == tensor.shape[-2]


def scale_one(chance: random.Random, draft: Draft) -> Draft:
    tensors, header = draft
    name = _choose(chance, tensors)
    return tensors | {name: _scaled(tensors[name], chance.choice(FACTORS))}, header


def scale_a_kind(chance: random.Random, draft: Draft) -> Draft:
    """Everything that belongs together: all factors, all log-variances, all weights."""
    tensors, header = draft
    kind, factor = _choose(chance, tensors).partition("/")[0], chance.choice(FACTORS)
    alike = [n for n in tensors if n.partition("/")[0] == kind or (not kind.startswith("~") and not n.startswith("~"))]
    return tensors | {n: _scaled(tensors[n], factor) for n in alike}, header


def poke_one_number(chance: random.Random, draft: Draft) -> Draft:
    tensors, header = draft
    name = _choose(chance, tensors)
    tensor = tensors[name].clone()
    if tensor.numel():
        at = chance.randrange(tensor.numel())
        tensor.view(-1)[at] = _scaled(tensor.view(-1)[at] + 1, chance.choice(FACTORS))
    return tensors | {name: tensor}, header


def shift_all(chance: random.Random, draft: Draft) -> Draft:
    """Log-variances of −30, logits of a million: added, not multiplied."""
    tensors, header = draft
    name = _choose(chance, tensors)
    by = chance.choice((-1e3, -30.0, -12.0, -1.0, 1.0, 12.0, 30.0, 1e3, 1e19, 1e38))
    return tensors | {name: _clamped(tensors[name].double() + by, tensors[name].dtype)}, header


def break_symmetry(chance: random.Random, draft: Draft) -> Draft:
    tensors, header = draft
    name = _choose(chance, tensors, square=True)
    tensor = tensors[name]
    if not _is_square(tensor):
        return draft
    return tensors | {name: (tensor + chance.choice((1e-6, 0.1, 10.0)) * tensor.triu(1)).to(tensor.dtype)}, header


def another_spectrum(chance: random.Random, draft: Draft) -> Draft:
    """diag(1e6, −0.9, …), all zeros, the identity, one direction alone."""
    tensors, header = draft
    name = _choose(chance, tensors, square=True)
    tensor = tensors[name]
    if not _is_square(tensor) or not tensor.is_floating_point():
        return draft
    n = tensor.shape[-1]
    values = torch.full((n,), chance.choice((-0.9, 0.0, 1.0, 1e-12)))
    values[0] = chance.choice((1e6, 1.0, -1.0, 1e30))
    return tensors | {name: torch.diag(values).expand_as(tensor).to(tensor.dtype).contiguous()}, header


def change_places(chance: random.Random, draft: Draft) -> Draft:
    tensors, header = draft
    first = _choose(chance, tensors)
    second = chance.choice([n for n, t in tensors.items() if t.shape == tensors[first].shape])
    return tensors | {first: tensors[second], second: tensors[first]}, header


def drop_one(chance: random.Random, draft: Draft) -> Draft:
    tensors, header = draft
    name = _choose(chance, tensors)
    return {n: t for n, t in tensors.items() if n != name}, header


def another_shape(chance: random.Random, draft: Draft) -> Draft:
    tensors, header = draft
    name = _choose(chance, tensors)
    t, flat = tensors[name], tensors[name].reshape(-1)
    shape = chance.choice((t[None], flat, flat[:-1], flat[:0], flat[:1], t.mT if t.ndim > 1 else flat))
    return tensors | {name: shape.contiguous()}, header


def another_number(chance: random.Random, draft: Draft) -> Draft:
    tensors, header = draft
    numbers = [k for k, v in header.items() if isinstance(v, int | float)]
    key = chance.choice([*numbers, "facts", "training", "spec"])
    return tensors, header | {key: chance.choice(NUMBERS)}


MUTATORS: tuple[Mutator, ...] = (
    scale_one,
    scale_a_kind,
    poke_one_number,
    shift_all,
    break_symmetry,
    another_spectrum,
    change_places,
    drop_one,
    another_shape,
    another_number,
)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return _clamped(tensor.double() * factor, tensor.dtype)


def _clamped(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return values.to(dtype)
    return values.nan_to_num().clamp(-(2**53), 2**53).to(dtype)


def mutant(method: str, seed: int) -> bytes:
    """One spoilt reply, by one or two mutators."""
    chance = random.Random(f"{method} {seed}")
    packet = decode(world(method)[4][LIAR])
    draft: Draft = (dict(packet.tensors), dict(packet.header))
    for change in chance.choices(MUTATORS, k=chance.choice((1, 1, 2))):
        draft = change(chance, draft)
    try:
        return encode(*draft)
    except ValueError:  # JSON has no word for this number: the one we wanted to lie with
        return encode(draft[0], {k: v for k, v in draft[1].items() if v == v and v not in (math.inf, -math.inf)})


def fate_of_reply(method: str, seed: int) -> tuple[Fate, str]:
    """What becomes of a mutant among five honest replies."""
    recipe, state, bench, brief, sent = world(method)
    envelopes = [Envelope(c, mutant(method, seed) if c == LIAR else p) for c, p in sent.items()]
    try:
        seen = admit_all(
            envelopes,
            brief,
            recipe.evidence,
            list(sent),
            opened=honest_packets(method),
            training=LOCAL,
            trains=recipe.trains,
        )
        clipped = {c["client"] for c in seen.clipped}
        if LIAR in seen.cohort.clients:
            check_finite(fuse_admitted(recipe, seen, state, bench))
    except Exception as why:
        return "foreign", f"{type(why).__name__}: {why}"
    if lost := sent.keys() - {LIAR, *seen.cohort.clients}:
        return "foreign", f"honest clients were lost: {sorted(lost)}, {seen.refused}"
    return ("refused" if seen.refused or LIAR in clipped else "harmless"), ""


@cache
def honest_packets(method: str) -> dict[str, Packet]:
    """What everybody else sent, opened once; without the mutant they are fused once too, which nobody may break."""
    recipe, state, bench, brief, sent = world(method)
    packets = {c: decode(p) for c, p in sent.items() if c != LIAR}
    envelopes = [Envelope(c, sent[c]) for c in packets]
    seen = admit_all(envelopes, brief, recipe.evidence, list(sent), training=LOCAL, trains=recipe.trains)
    assert not seen.refused
    check_finite(fuse_admitted(recipe, seen, state, bench))
    return packets


def check_finite(after: ServerState) -> None:
    for member in after.model.members:
        if not all(torch.isfinite(t).all() for t in member.posterior.mean.values() if t.is_floating_point()):
            raise AssertionError("the fused model is not finite")


# Files


@cache
def good_files() -> dict[str, bytes]:
    """A small file of every kind that somebody else may have written."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (32, 32, 3, 2), dtype=np.uint8)
    (mat := io.BytesIO()), (npz := io.BytesIO()), (png := io.BytesIO())
    savemat(mat, {"X": pixels, "y": np.array([[10], [3]], dtype=np.uint8)}, do_compression=True)
    np.savez_compressed(npz, x=draw.random((4, 3)), y=np.arange(4), classes=np.array(list("abcd")))
    Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(png, "PNG")
    idx = bytes([0, 0, 8, 1, 0, 0, 0, 5]) + bytes(range(5))
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec("mlp", {"inputs": 3, "hidden": [2], "classes": 2})
        save_model(Single.of(spec.build(), spec), Path(folder) / "m", {"round": 1})
        model = (Path(folder) / "m").read_bytes()
    ledger = b'{"label":"a","seed":0,"round":1,"accuracy":0.5}\n{"label":"a","seed":0,"round":2}\n'
    kinds = {"mat": mat.getvalue(), "npz": npz.getvalue(), "png": png.getvalue(), "idx.gz": gzip.compress(idx)}
    return kinds | {"safetensors": model, "jsonl": ledger}


def _read(kind: str, folder: Path) -> object:
    path = folder / f"x.{kind}"
    readers: dict[str, Callable[[], object]] = {
        "mat": lambda: formats.parse_svhn(path.read_bytes(), path).rows(),
        "npz": lambda: formats.split_from_arrays(formats.read_npz(path) | {"y_": 0}, "x", "y", path).rows(),
        "png": lambda: images.ImageSplit(Folder(folder), np.array([path.name]), np.array([0])).rows(),
        "idx.gz": lambda: formats.parse_idx(Folder(folder).read("x.idx"), path),
        "safetensors": lambda: load_model(path),
        "jsonl": lambda: Ledger(path).lines(),
    }
    return readers[kind]()


FILES = ("mat", "npz", "png", "idx.gz", "safetensors", "jsonl")


def spoil_file(kind: str, seed: int) -> bytes:
    """Bits flipped, a stretch cut, doubled or filled; inside an archive, also before it is packed again."""
    chance, data = random.Random(f"{kind} {seed}"), bytearray(good_files()[kind])
    if kind == "idx.gz" and chance.random() < 0.5:
        return gzip.compress(_spoil(chance, bytearray(gzip.decompress(bytes(data)))))
    if kind == "npz" and chance.random() < 0.5:
        return _spoil_member(chance, bytes(data))
    return _spoil(chance, data)


def _spoil(chance: random.Random, data: bytearray) -> bytes:
    begin = chance.randrange(len(data))
    end = min(len(data), begin + chance.choice((1, 1, 1, 4, 8, 40)))
    match chance.randrange(5):
        case 0:
            data[begin] ^= 1 << chance.randrange(8)
        case 1:
            data[begin:end] = bytes([chance.choice((0, 0x7F, 0x80, 0xFF))]) * (end - begin)
        case 2:
            del data[begin:end]
        case 3:
            data[begin:begin] = data[begin:end]
        case _:
            del data[begin:]
    return bytes(data)


def _spoil_member(chance: random.Random, data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = chance.choice(list(members))
    members[name] = _spoil(chance, bytearray(members[name]))
    with zipfile.ZipFile(out := io.BytesIO(), "w") as archive:
        for one, content in members.items():
            archive.writestr(one, content)
    return out.getvalue()


def fate_of_file(kind: str, seed: int) -> tuple[Fate, str]:
    """What becomes of a spoilt file: it is read, or refused in one sentence of ours."""
    folder = Path(_folder().name)
    (folder / f"x.{kind}").write_bytes(spoil_file(kind, seed))
    try:
        _read(kind, folder)
    except FuseError as why:
        return ("foreign", f"more than one line: {why}") if "\n" in str(why) else ("refused", "")
    except Exception as why:
        return "foreign", f"{type(why).__name__}: {why}"
    return "harmless", ""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """One folder for all spoilt files of a process: making and removing one costs as much as reading."""
    return tempfile.TemporaryDirectory()


def fate(kind: str, seed: int) -> tuple[Fate, str]:
    """What becomes of a mutant of a method's reply or of a kind of file."""
    return fate_of_file(kind, seed) if kind in FILES else fate_of_reply(kind, seed)


KINDS = (*FILES, *METHODS)
