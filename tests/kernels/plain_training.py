"""What the kernels are measured against: the same training written with torch's autograd, in any precision."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.kernels.chain.network import Chain
from fedfuse.kernels.chain.trace import chain_of
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode

State = dict[str, Tensor]


def rows(shape: tuple[int, ...], count: int, classes: int = 3, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(count, *shape, generator=draw), torch.randint(classes, (count,), generator=draw))


def seeded(make: type[nn.Module] | object, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net: nn.Module = make()  # type: ignore[operator]
    return net.train()


def by_chain(net: nn.Module, data: Rows, batch: int, lr: float = 1.0, momentum: float = 0.0) -> State:
    """Weights after one pass through the rows as they lie, by a chain of its own."""
    net, shape = copy.deepcopy(net), tuple(data.x.shape[1:])
    chain = Chain(chain_of(net, shape), shape, batch)
    settings = LocalSettings(batch_size=batch, optimizer={"lr": lr, "momentum": momentum})
    round_ = chain.begin(net, settings, 0.0, {}, {})
    chain.batches(round_, data.x, data.y, torch.arange(len(data)), lr, torch.Generator().manual_seed(0))
    chain.finish(net)
    return dict(net.state_dict())


def by_torch(
    net: nn.Module, data: Rows, batch: int, lr: float = 1.0, momentum: float = 0.0, dtype: torch.dtype = torch.float64
) -> State:
    """The same by autograd."""
    net = copy.deepcopy(net).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum)
    for x, y in zip(data.x.to(dtype).split(batch), data.y.split(batch), strict=True):
        for norm in (m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            norm.train(len(y) > 1)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return dict(net.state_dict())


def error(mine: State, theirs: State) -> float:
    """The largest difference of any tensor, relative to that tensor's largest number."""
    return max(
        float((mine[n].double() - theirs[n].double()).abs().max() / theirs[n].double().abs().max().clamp(min=1e-30))
        for n in theirs
    )


def step_error(net: nn.Module, data: Rows, batch: int) -> float:
    """The largest error of a step, relative to the largest step of that tensor: with a rate of 1, of the gradient."""
    start = {n: t.double() for n, t in net.state_dict().items()}
    mine, theirs = (
        {n: t.double() - start[n] for n, t in s.items()}
        for s in (by_chain(net, data, batch), by_torch(net, data, batch))
    )
    return error(mine, theirs)


def trained(
    work: Work, net: nn.Module, data: Rows, kernel: str, seed: int = 0, round_: int = 0
) -> tuple[State, dict[str, object]]:
    """What a client sends by one kernel, and its header."""
    spec = Spec.of(net)
    brief = Brief(round_, spec, {n: t.clone() for n, t in net.state_dict().items()}, classes=3)
    work = replace(work, settings=work.settings.model_copy(update={"kernel": kernel}))
    packet = decode(client_round(work, brief, "a", data, seed=seed).payload)
    return dict(packet.tensors), dict(packet.header)
