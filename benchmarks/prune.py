"""What pruning costs and what it saves, beside one local epoch of 2,000 rows of the same network.

First table: the spectrum by Lanczos, the ranks of feature maps, finding the channels, and removing them; each should
cost less than the epoch. Second table: seconds per local epoch of networks with half of their channels, as a share of
the whole one's, beside the share of FLOPs; a round should become faster in the same ratio within 30 %. An epoch is
timed on its first batches and scaled up; whole and pruned batches are timed in turn, and each keeps its best time.
Seconds are the processor's own, on one thread, so that busy neighbours do not count.

    python benchmarks/prune.py [--model resnet18] [--rows 2000] [--batches 4] [--rate 0.5] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from fedfuse.core.messages import Brief
from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.nets.channels import channel_groups, keep_channels
from fedfuse.nets.cost import training_flops
from fedfuse.nets.curvature import CurvatureProbe
from fedfuse.server.steps.prune import filters_of, rank_scores, units_to_keep
from fedfuse.training.round import train_on_rows

IMAGES, BATCH = 500, 64
SHAPES = {"resnet18": (3, 32, 32), "vgg11": (3, 32, 32), "convnet_feddu": (3, 32, 32), "lenet": (1, 28, 28)}


def main() -> None:
    said = arguments()
    torch.set_num_threads(1)
    shape = SHAPES[said.model]
    spec = Spec(said.model, {"channels": shape[0], "size": shape[1]})
    torch.manual_seed(0)
    model, data = Single.of(spec.build(), spec), rows(shape, max(IMAGES, BATCH * said.batches))
    epoch = epochs([model], data, said.rows, said.batches)[0]
    parts = costs(model, data, shape)
    names = [said.model] if said.model == "lenet" else ["lenet", said.model]
    ratios = [saved(name, said.rate, said.rows, said.batches) for name in names]
    if said.json:
        print(json.dumps({"model": said.model, "epoch_seconds": epoch, "parts": parts, "ratios": ratios}))
        return
    print(f"{said.model}: one local epoch of {said.rows:,} rows takes {epoch:.1f} s on one core")
    for name, seconds in parts.items():
        print(f"  {name:34} {seconds:8.2f} s {seconds / epoch:8.2f} epochs")
    print(f"with {said.rate:.0%} of the channels gone, as a share of the whole network's")
    for row in ratios:
        told = "   ".join(f"{key} {row[key]:.2f}" for key in ("seconds", "flops", "weights"))
        print(f"  {row['model']:16} {told}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="resnet18")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batches", type=int, default=4, help="of the epoch that are timed")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def rows(shape: tuple[int, ...], count: int) -> Rows:
    draw = torch.Generator().manual_seed(1)
    return Rows(torch.rand(count, *shape, generator=draw), torch.randint(10, (count,), generator=draw))


def seconds_of(what: Callable[[], object]) -> float:
    began = time.process_time()
    what()
    return time.process_time() - began


def epochs(models: list[Single], data: Rows, count: int, batches: int, repeats: int = 3) -> list[float]:
    """Seconds per local epoch of some networks, timed in turn."""
    some = data.take(torch.arange(BATCH * batches))
    best = [float("inf")] * len(models)
    for _ in range(repeats):
        for at, model in enumerate(models):
            brief = Brief(0, model.spec, model.posterior.mean, classes=10)
            work = Work(LocalSettings(batch_size=BATCH, optimizer={"lr": 1e-3}))
            spent = seconds_of(lambda brief=brief, work=work: train_on_rows(work, brief, "c", some))
            best[at] = min(best[at], spent)
    return [seconds * count / (BATCH * batches) for seconds in best]


def costs(model: Single, data: Rows, shape: tuple[int, ...]) -> dict[str, float]:
    """Seconds of each part of a pruning."""
    spec, module = model.spec, model.spec.build()
    module.load_state_dict(dict(model.posterior.mean))
    start = {n: p.detach() + 1e-3 for n, p in module.named_parameters()}
    look, draw = CurvatureProbe(), torch.Generator().manual_seed(2)
    spent = {f"spectrum, {look.steps} products": seconds_of(lambda: look(module, start, data, draw))}
    spent["finding the channels"] = seconds_of(lambda: channel_groups(spec, shape))
    filters = filters_of(spec, shape)
    x = data.x[:IMAGES]
    spent[f"ranks of {IMAGES} rows' feature maps"] = seconds_of(lambda: rank_scores(model, filters, x, None))
    keep = {f.group: torch.arange(f.group.size // 2) for f in filters}
    spent["removing half of them"] = seconds_of(lambda: keep_channels(spec, model.posterior.mean, keep))
    return spent


def saved(name: str, rate: float, count: int, batches: int) -> dict[str, Any]:
    """What a network costs with some of its channels gone, as shares of what it costs whole."""
    shape = SHAPES[name]
    spec = Spec(name, {"channels": shape[0], "size": shape[1]})
    whole = Single.of(spec.build(), spec)
    keep = {f.group: units_to_keep(torch.rand(f.group.size), rate) for f in filters_of(spec, shape)}
    small_spec, weights = keep_channels(spec, whole.posterior.mean, keep)
    small = Single.of(_filled(small_spec, weights), small_spec)
    before, after = epochs([whole, small], rows(shape, BATCH * batches), count, batches)
    sizes = [sum(t.numel() for t in m.posterior.mean.values()) for m in (whole, small)]
    flops = training_flops(small_spec, shape) / training_flops(spec, shape)
    return {"model": name, "seconds": after / before, "flops": flops, "weights": sizes[1] / sizes[0]}


def _filled(spec: Spec, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    module = spec.build()
    module.load_state_dict(weights)
    return module


if __name__ == "__main__":
    main()
