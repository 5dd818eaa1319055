"""Very many small replies: through the door, region by region, into sums of sums."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch
import torch.nn.functional as F

from fedfuse.api.fusion import add_updates
from fedfuse.core.messages import Brief, ClientUpdate, Envelope
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.linalg.ridge import Sums
from fedfuse.methods.refit import refit
from fedfuse.nets.head import moment_notes, total_sums
from fedfuse.server.admission.admit import admit_all
from fedfuse.wire.codec import decode
from fedfuse.wire.messages import NOTE, encode_reply
from scale import peak_and_forget

FEATURES, CLASSES, ROWS = 4, 2, 5


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the stream was, when, and with how much memory since the mark before."""

    replies: int
    seconds: float
    busy_seconds: float  # of the processor, which other work on the machine does not lengthen
    peak_mib: float


def replies(brief: Brief, begin: int, end: int) -> Iterator[Envelope]:
    """The replies of some clients: sums of a few random rows each."""
    for k in range(begin, end):
        draw = torch.Generator().manual_seed(k)
        phi = torch.cat([torch.randn(ROWS, FEATURES, generator=draw), torch.ones(ROWS, 1)], 1)
        labels = F.one_hot(torch.randint(CLASSES, (ROWS,), generator=draw), CLASSES)
        notes = moment_notes(Sums.of(phi, labels))
        yield Envelope(f"client-{k}", encode_reply(brief, {}, notes, num_examples=ROWS, steps=0, facts={}))


def admit_region(recipe: Recipe, brief: Brief, begin: int, end: int) -> list[ClientUpdate]:
    """The admitted updates of one region."""
    asked = tuple(f"client-{k}" for k in range(begin, end))
    admission = admit_all(replies(brief, begin, end), brief, recipe.evidence, asked, trains=False)
    return list(admission.cohort)


def stream(count: int, region: int = 1000, marks: int = 10) -> tuple[list[Mark], float]:
    """Send so many replies through, a region at a time; the marks on the way, and the rows that arrived."""
    spec, recipe = Spec("mlp", {"inputs": FEATURES, "hidden": [], "classes": CLASSES}), refit()
    brief = ServerState(0, Single.of(spec.build(), spec)).brief((), CLASSES)
    began, worked = time.perf_counter(), time.process_time()
    every, found = max(region, count // marks), list[Mark]()
    total: dict[str, torch.Tensor] = {}
    peak_and_forget(psutil.Process())
    for begin in range(0, count, region):
        end = min(begin + region, count)
        packet = decode(add_updates(admit_region(recipe, brief, begin, end), {}, f"region-{begin}").payload)
        for name in packet.tensors:
            plain = name.removeprefix(NOTE)
            total[plain] = total[plain] + packet.tensors[name] if plain in total else packet.tensors[name].clone()
        if end % every == 0 or end == count:
            seconds, busy = time.perf_counter() - began, time.process_time() - worked
            found.append(Mark(end, seconds, busy, peak_and_forget(psutil.Process()) / 2**20))
    return found, total_sums([total]).count
