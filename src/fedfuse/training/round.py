"""A client's round: see the rows, train, bring evidence. The only training loop there is."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedfuse.core.messages import Brief
from fedfuse.core.params import Params, squared_distance
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import MoveNoise
from fedfuse.core.spec import Spec, tie
from fedfuse.core.state import Local, entries_of, with_kind
from fedfuse.core.torch_utils import one_thread
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import carry_over
from fedfuse.training.epochs import TorchEpochs, compiled_epochs, suits_channels_last
from fedfuse.wire.codec import Packet, decode, forms_of, laid_out
from fedfuse.wire.messages import mark_notes, reply_header, split

CHANNELS = "channels"  # of a pruned network: which of its original channels the remembered tensors have


def fit_memory(memory: Params, brief: Brief, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A client's memory as it fits the network of a brief, and what had to be done, as facts for the reply.

    Control variates and last models are kept by tensor. Where a pruning has taken channels since, those of the others
    are carried over; where nobody can tell which those are, everything of that kind is forgotten together, so that a
    control variate is zero again and there is no last model.

    Args:
        memory: what the client kept.
        brief: what the server sent.
        shape: the shape of one of its inputs.
    """
    fitted, facts = dict(memory), dict[str, float]()
    before = {layer: t.tolist() for layer, t in entries_of(memory, CHANNELS).items()}
    for kind in sorted({name.partition("/")[0] for name in memory} - {CHANNELS}):
        own = entries_of(memory, kind)
        if _fits(own, brief):
            continue
        moved = carry_over(own, before, brief.spec, shape)
        fitted = {n: t for n, t in fitted.items() if not n.startswith(f"{kind}/")} | with_kind(kind, moved or {})
        facts[f"{'forgot' if moved is None else 'carried over'} {kind}"] = float(len(own))
    return fitted, facts


def with_channels(memory: Mapping[str, Tensor], brief: Brief) -> dict[str, Tensor]:
    """The memory after a round, with the channels of the network it is of, if that was pruned."""
    rest = {n: t for n, t in memory.items() if not n.startswith(f"{CHANNELS}/")}
    kept = {layer: torch.tensor(units) for layer, units in brief.spec.kept.items()}
    return rest | with_kind(CHANNELS, kept) if rest else {}


def _fits(own: Params, brief: Brief) -> bool:
    """Whether what is remembered by tensor has the network's names and shapes; other things have names of their own."""
    forms = forms_of(brief.params)
    known = [name for name in own if name in forms]
    return not known or (len(known) == len(own) and all(own[n].shape == forms[n].shape for n in known))


def disturb_move(trained: Params, brief: Brief, how: MoveNoise, seeded: torch.Generator) -> dict[str, Tensor]:
    """Trained weights whose move from the brief's is no longer than C and has noise N(0, (zC)²/K) in every number.

    Counters stay as they are, and variances of running statistics are kept from falling below zero.

    Args:
        trained: the weights.
        brief: what the client began with.
        how: C, z and K.
        seeded: where noise comes from if it is to be reproducible.
    """
    length = math.sqrt(squared_distance(trained, brief.params))
    share = min(1.0, how.clip / length) if length else 1.0
    draw = seeded if how.reproducible else torch.Generator().manual_seed(secrets.randbits(63))
    roles, moved = brief.spec.layout.roles, dict[str, Tensor]()
    for name, tensor in trained.items():
        moved[name] = tensor
        if tensor.is_floating_point():
            start = brief.params[name].to(tensor.device).double()
            noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.device) * how.sigma
            moved[name] = (start + share * (tensor.double() - start) + noise).to(tensor.dtype)
        if roles.get(name) == "statistic" and name.endswith("running_var"):
            moved[name] = moved[name].clamp(min=0)
    return moved


class RoundAnswer(NamedTuple):
    """What a client's round gives: its reply, and what the client remembers for the next."""

    reply: Packet
    memory: dict[str, Tensor]

    @property
    def payload(self) -> bytes:
        """The reply as it travels."""
        return self.reply.to_bytes()


class TrainingResult(NamedTuple):
    """What training alone gives: the weights and buffers, how many steps it took, and the last epoch's mean loss."""

    params: dict[str, Tensor]
    steps: int
    loss: float


def train_on_rows(work: Work, brief: Brief, who: str, rows: Rows, *, seed: int = 0) -> TrainingResult:
    """Train on some rows exactly as a client would, and bring no evidence: how a server learns on rows of its own.

    Args:
        work: how to train; its view and evidence are not asked.
        brief: the network and the weights to begin with.
        who: whose random streams are used.
        rows: what to train on.
        seed: the run's seed.
    """
    local = _prepare_local(work, brief, who, Rows(rows.x.contiguous(), rows.y), {}, seed)
    with one_thread(), seeded(seed, brief.round, who, "torch"):
        train(local, work)
    state = local.module.state_dict()
    params = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in state.items()}
    return TrainingResult(params, local.steps, local.loss)


def client_round(
    work: Work,
    brief: Brief,
    client: str,
    rows: Rows,
    *,
    memory: Params | None = None,
    seed: int = 0,
    trained: bytes | None = None,
) -> RoundAnswer:
    """Do one round at one client; the result is a pure function of the arguments.

    Args:
        work: the recipe's client half and the settings.
        brief: what the server said to this client.
        client: its id, which names its random streams.
        rows: its own data.
        memory: what it kept from earlier rounds.
        seed: the run's seed.
        trained: a reply to the same brief from the same training without evidence; training is then skipped.
    """
    rows = work.view(rows, brief)
    if not len(rows):
        raise ConfigError(
            f"{client} has no rows to {'train on' if work.trains else 'look at'}; give it data or leave it out"
        )
    known, facts = fit_memory(memory or {}, brief, tuple(rows.x.shape[1:]))
    local = _prepare_local(work, brief, client, rows, known, seed)
    with seeded(seed, brief.round, client, "torch"):
        if trained is None:
            if work.trains:
                train(local, work)
        else:
            _resume_trained(local, trained)
    local.module.eval()
    notes: dict[str, Tensor] = {}
    with seeded(seed, brief.round, client, "evidence"):  # the same draws whether the training was done or remembered
        for bring in work.evidence:
            notes.update(bring(local))
        for keep in work.memory:
            local.memory.update(keep(local, notes))
    mean = {n: t.detach() for n, t in local.module.state_dict().items()} if work.trains else {}
    facts = {"loss": local.loss, **facts} | ({"compiled": 1.0} if local.compiled else {})
    if (hide := work.settings.private) is not None:
        facts = {}  # a loss would tell of rows
        if trained is None:  # what was remembered has its noise already
            mean = disturb_move(mean, brief, hide, local.stream("privacy"))
    header = reply_header(brief, num_examples=float(len(rows)), steps=local.steps, facts=facts, training=work.settings)
    remembered = dict(laid_out(with_channels(local.memory, brief)))
    return RoundAnswer(Packet.of({**mean, **mark_notes(notes)}, header), remembered)


def train(local: Local, work: Work) -> None:
    """The loop: for each epoch, for each batch, a gradient of the objective, a step, a projection."""
    settings = work.settings
    if not settings.epochs:
        return
    if not local.live:
        raise ConfigError(
            f"model {local.brief.spec.factory!r} has nothing to train: all its parameters are frozen; "
            "let requires_grad be true for those that should learn"
        )
    _set_training_mode(local)
    epochs = compiled_epochs(local, work) or TorchEpochs(local, work)
    for epoch in range(settings.epochs):
        local.lr = settings.rate(local.brief.round, epoch)
        local.loss = epochs.run(epoch)
        if local.steps == settings.max_steps:
            break
    epochs.finish()


def _set_training_mode(local: Local) -> None:
    """Set the network to training; a part whose parameters are all held rests, its statistics too.

    What its author froze stays frozen, and a frozen norm goes on counting its rows, as it would in the author's loop.
    """
    local.module.train()
    _restore_requires_grad(local.module, local.brief.spec)
    for path, part in local.module.named_modules():
        own = {f"{path}.{name}" if path else name for name, _ in part.named_parameters(recurse=False)}
        if own and own <= local.held:
            part.eval().requires_grad_(False)


def _restore_requires_grad(module: nn.Module, spec: Spec) -> None:
    """Let those parameters train that their author lets train."""
    free = set(spec.layout.trainable)
    for name, param in module.named_parameters():
        param.requires_grad_(name in free)


def _prepare_local(work: Work, brief: Brief, client: str, rows: Rows, memory: dict[str, Tensor], seed: int) -> Local:
    device = work.settings.device
    x, y = brief.spec.cast(rows.x).to(device), rows.y.to(device)
    last = suits_channels_last(brief.spec, tuple(x.shape[1:]), x.dtype, device)
    module = _cached_module(brief.spec, device, last)
    module.load_state_dict(dict(tie(brief.spec, brief.params)))
    _restore_requires_grad(module, brief.spec)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return Local(client, brief, Rows(x, y), work.settings, module, memory, seed)


@lru_cache(maxsize=4)
def _cached_module(spec: Spec, device: str, last: bool) -> nn.Module:
    """One module per network and process; weights come and go by copy."""
    module = spec.build().to(device)
    return module.to(memory_format=torch.channels_last) if last else module  # type: ignore[call-overload]


def _resume_trained(local: Local, trained: bytes) -> None:
    packet = decode(trained)
    local.module.load_state_dict(dict(split(packet)[0]))
    local.steps = int(packet.header["steps"])
    local.loss = float(packet.header["facts"].get("loss", "nan"))
    local.compiled = "compiled" in packet.header["facts"]
    if last := local.settings.epochs:
        local.lr = local.settings.rate(local.brief.round, last - 1)
