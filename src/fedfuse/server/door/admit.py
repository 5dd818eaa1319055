"""The door: everything a client sends is judged here, once, and nobody behind it checks again.

In order: size before anything is read → the table of contents before anything is allocated → round, network, names,
shapes and dtypes equal to the brief's → numbers of examples and steps in range → values finite → each piece of evidence
by its own check → one reply per client, nobody far above the others in examples or steps. A refusal names client,
field, what came and what was expected; the round goes on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Envelope, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry, Posterior
from fedfuse.core.seams import Evidence
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.threads import one_thread
from fedfuse.errors import ConfigError, FuseError, Refused
from fedfuse.wire.codec import LazyParams, Limits, Malformed, Packet, decode, forms_of, forms_size, piece_of, read
from fedfuse.wire.messages import NOTE, VERSION, split
from fedfuse.wire.spool import Spool

_HEADER_BYTES = 65_536  # our own header, generously
_ENTRY_BYTES = 512  # a tensor's line in the table of contents, generously
_MAX_EXAMPLES = 10**12  # more examples than anybody has, and far below where a sum of num_examples could overflow
_MAX_STEPS = 10**9
_MAX_COUNT = 2**53  # a counter that others can still count on from
LEAST_LOG_VARIANCE = -30.0  # smaller variances are raised to this one: their precisions would drown everybody else's
_MOST_LOG_VARIANCE = 20.0  # a standard deviation of 22,000 is no belief about a weight


@dataclass(frozen=True, slots=True)
class Rules:
    """What a server insists on.

    Attributes:
        quorum: the share of asked clients that must be admitted for the round to count.
        examples_ratio: without an enrolled count, a num_examples may be at most this multiple of the round's median;
            so may a number of local steps, which grows with an enrolled num_examples.
        memory: bytes of admitted updates held in memory; the rest is kept in files.
        trusted: model factories outside fedfuse that the user named.
    """

    quorum: float = 0.5
    examples_ratio: float = 100.0
    memory: int = 2 * 2**30
    trusted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Contract:
    """What one client's reply to one brief must look like."""

    round: int
    spec: Spec
    forms: Mapping[str, Form]
    evidence: tuple[Evidence, ...]
    roles: Mapping[str, str]
    limits: Limits
    enrolled: int | None = None
    training: LocalSettings | None = None

    @classmethod
    def of(cls, brief: Brief, evidence: tuple[Evidence, ...], training: LocalSettings | None = None) -> Contract:
        """The contract that follows from a brief as a client hears it, and from how it was told to train."""
        forms = dict(forms_of(brief.params))
        for kind in evidence:
            forms |= {NOTE + n: form for n, form in kind.expects(brief).items()}
        limits = _limits(forms, brief.spec)
        return cls(brief.round, brief.spec, forms, evidence, brief.spec.layout.roles, limits, training=training)


def _limits(forms: Mapping[str, Form], spec: Spec) -> Limits:
    """The size a good reply cannot exceed."""
    header = _HEADER_BYTES + _ENTRY_BYTES * len(forms) + sum(map(len, forms)) + len(spec.to_text()) * 2
    return Limits(bytes=forms_size(forms) + header, header=header, tensors=len(forms) + 1)


@dataclass(slots=True)
class Admission:
    """What came through the door in one round, and what did not."""

    cohort: Cohort
    spool: Spool
    refused: list[dict[str, str]] = field(default_factory=list)
    dropped: list[dict[str, str]] = field(default_factory=list)
    bytes_up: int = 0
    seconds: float = 0.0
    trained: int = 0
    remembered: int = 0


def admit(envelope: Envelope, contract: Contract, packet: Packet | None = None) -> ClientUpdate:
    """Untrusted to trusted, or `Refused`; one client's fault never ends a round.

    Raises:
        Refused: naming the client, the field, what came and what was expected.
    """
    client = envelope.client
    packet = packet or _open(envelope, contract)
    _check_header(client, packet.header, contract)
    _check_forms(client, packet.tensors.forms, contract.forms)
    num_examples, steps = _mass(client, packet.header, contract), _steps(client, packet.header)
    training = _training(client, packet.header, contract)
    mean, notes = split(packet)
    try:
        _check_values(client, packet.tensors, contract.roles)
    except Malformed as why:
        raise Refused(client, "reply", str(why), "a file that stays as it is") from why
    geometry = _check_evidence(client, notes, num_examples, contract)
    mean, raised = _floored(mean, contract.roles)
    posterior = Posterior(mean, geometry) if geometry is not None else Posterior(mean)
    facts = _facts(packet.header) | ({"raised_variances": float(raised)} if raised else {})
    return ClientUpdate(client, posterior, num_examples, steps, contract.spec, notes, facts, training)


def admit_all(
    envelopes: Iterable[Envelope],
    brief: Brief,
    evidence: tuple[Evidence, ...],
    asked: Iterable[str],
    rules: Rules | None = None,
    enrolled: Mapping[str, int] | None = None,
    opened: Mapping[str, Packet] | None = None,
    training: LocalSettings | None = None,
) -> Admission:
    """Judge a round's replies as they arrive; beyond the memory limit they wait in files.

    Args:
        envelopes: what the transport brings.
        brief: what was asked.
        evidence: what was asked beside the weights.
        asked: who was asked.
        rules: what the server insists on.
        enrolled: how many examples each client has declared beforehand.
        opened: replies that somebody had to open before, by client; their payloads are not read again.
        training: how clients were told to train, where they were told.
    """
    rules, enrolled, opened = rules or Rules(), enrolled or {}, opened or {}
    seen, updates = Admission(Cohort(()), Spool(rules.memory)), dict[str, ClientUpdate]()
    expected, common = frozenset(asked), Contract.of(brief.to(""), evidence, training)
    for envelope in envelopes:
        seen.seconds += envelope.seconds
        if envelope.payload is None:
            seen.dropped.append({"client": envelope.client, "reason": envelope.dropped})
            continue
        seen.bytes_up += _size(envelope)
        seen.remembered += envelope.remembered
        seen.trained += not envelope.remembered
        try:
            _check_turn(envelope.client, expected, updates)
            own = envelope.client in brief.own
            contract = Contract.of(brief.to(envelope.client), evidence, training) if own else common
            if envelope.client in enrolled:
                contract = replace(contract, enrolled=enrolled[envelope.client])
            packet = opened.get(envelope.client)
            kept = envelope if packet else seen.spool.keep(envelope, contract.limits.bytes)
            updates[envelope.client] = admit(kept, contract, packet)
        except Refused as why:
            seen.refused.append(why.facts())
    seen.cohort = Cohort.of(_fair(list(updates.values()), rules.examples_ratio, enrolled, seen.refused))
    return seen


def _size(envelope: Envelope) -> int:
    if isinstance(envelope.payload, bytes):
        return len(envelope.payload)
    return envelope.payload.stat().st_size if envelope.payload and envelope.payload.exists() else 0


def _check_turn(client: str, asked: frozenset[str], updates: Mapping[str, ClientUpdate]) -> None:
    if client in updates:
        raise Refused(client, "reply", "a second one", "one reply per client and round")
    if client not in asked:
        raise Refused(client, "client", "a stranger", "a client that was asked in this round")


def _open(envelope: Envelope, contract: Contract) -> Packet:
    try:
        if isinstance(envelope.payload, bytes):
            return decode(envelope.payload, contract.limits)
        if envelope.payload is not None:
            return read(envelope.payload, contract.limits)
    except Malformed as why:
        raise Refused(envelope.client, "reply", str(why), "a safetensors reply as briefed") from why
    raise Refused(envelope.client, "reply", "nothing", "a safetensors reply as briefed")


def _check_header(client: str, header: Mapping[str, Any], contract: Contract) -> None:
    if header.get("kind") != "reply" or header.get("version") != VERSION:
        got = f"{header.get('kind')!r} of version {header.get('version')!r}"
        raise Refused(client, "message", got, f"a reply of version {VERSION}")
    if header.get("round") != contract.round or isinstance(header.get("round"), bool):
        raise Refused(client, "round", repr(header.get("round")), f"{contract.round}, the round asked for")
    if header.get("spec") == contract.spec.to_json():
        return
    try:
        spec = Spec.from_json(header.get("spec"), contract.spec.factories)
    except ConfigError as why:
        raise Refused(client, "spec", str(why), f"the network briefed ({contract.spec.factory})") from why
    raise Refused(client, "spec", _spec_words(spec), f"the network briefed, {_spec_words(contract.spec)}")


def _spec_words(spec: Spec) -> str:
    changed = f" with {len(spec.surgery)} resized tensors" if spec.surgery else ""
    return f"{spec.factory}({', '.join(f'{k}={v}' for k, v in spec.options.items())}){changed}"


def _check_forms(client: str, got: Mapping[str, Form], expected: Mapping[str, Form]) -> None:
    if got == expected:
        return
    if missing := [n for n in expected if n not in got]:
        raise Refused(client, missing[0].removeprefix(NOTE), "missing", form_words(expected[missing[0]]))
    if extra := [n for n in got if n not in expected]:
        raise Refused(client, _printable(extra[0].removeprefix(NOTE)), "sent unasked", "only what was asked for")
    for name, form in expected.items():
        if got[name] != form:
            raise Refused(client, name.removeprefix(NOTE), form_words(got[name]), form_words(form))


def _printable(name: str) -> str:
    """A name nobody here chose, fit for a log."""
    return name if name and name.isprintable() and len(name) <= 80 else ascii(name)[:80]


def form_words(form: Form) -> str:
    """A form in words: "6×1×5×5 float32"."""
    return f"{'×'.join(map(str, form.shape)) or 'a scalar'} {str(form.dtype).removeprefix('torch.')}"


def _mass(client: str, header: Mapping[str, Any], contract: Contract) -> float:
    num_examples = header.get("num_examples")
    if (
        not isinstance(num_examples, int | float)
        or isinstance(num_examples, bool)
        or not 0 < num_examples <= _MAX_EXAMPLES
    ):
        raise Refused(
            client, "num_examples", repr(num_examples), f"a number of examples above 0 and up to {_MAX_EXAMPLES:,}"
        )
    if contract.enrolled is not None and num_examples > contract.enrolled:
        raise Refused(
            client, "num_examples", num_examples, f"at most {contract.enrolled}, the examples it enrolled with"
        )
    return float(num_examples)


def _steps(client: str, header: Mapping[str, Any]) -> int:
    steps = header.get("steps")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= _MAX_STEPS:
        raise Refused(client, "steps", repr(steps), f"a whole number from 1 to {_MAX_STEPS:,}")
    return steps


def _training(client: str, header: Mapping[str, Any], contract: Contract) -> LocalSettings | None:
    """How the client says it trained; where the server told it how, it must have trained so."""
    if "training" not in header:
        return contract.training
    try:
        said = LocalSettings.from_json(header["training"])
    except ConfigError as why:
        raise Refused(client, "training", str(why), "the settings it trained with") from why
    if contract.training is None:
        return said
    theirs, ours = said.to_json(), contract.training.to_json()
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            raise Refused(client, f"training.{key}", theirs.get(key), f"{ours.get(key)}, as it was told")
    return contract.training


def _facts(header: Mapping[str, Any]) -> dict[str, float]:
    """Loss and the like: kept if they are plain numbers, for the ledger only."""
    facts = header.get("facts")
    if not isinstance(facts, dict):
        return {}
    plain = {str(k)[:40]: v for k, v in list(facts.items())[:16] if isinstance(v, int | float)}
    return {k: float(v) for k, v in plain.items() if not isinstance(v, bool) and abs(v) < 1e300}


def _check_values(client: str, tensors: LazyParams, roles: Mapping[str, str]) -> None:
    for run in tensors.runs():
        with one_thread():  # one glance at memory: several threads would mostly wait for each other
            finite = all(is_finite(piece) for piece in tensors.pieces(run))
        if not finite:
            culprit = next(name for name in run if not is_finite(tensors[name]))
            raise Refused(client, culprit.removeprefix(NOTE), "not finite", "finite numbers")
    for name in tensors:
        role = roles.get(name)
        if role not in ("statistic", "log_variance", "counter"):
            continue
        tensor = tensors[name]
        if role == "statistic" and name.endswith("running_var") and bool((tensor < 0).any()):
            raise Refused(client, name, float(tensor.min()), "variances ≥ 0")
        if role == "log_variance" and tensor.numel() and float(tensor.max()) > _MOST_LOG_VARIANCE:
            raise Refused(client, name, float(tensor.max()), f"log-variances up to {_MOST_LOG_VARIANCE:g}")
        if role == "counter" and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) <= _MAX_COUNT:
            raise Refused(client, name, [int(tensor.min()), int(tensor.max())], f"counts from 0 to {_MAX_COUNT:,}")


def _floored(mean: Params, roles: Mapping[str, str]) -> tuple[Params, int]:
    """The tensors with every log-variance raised to the least one allowed, and how many had to be."""
    log_variances = frozenset(name for name, role in roles.items() if role == "log_variance" and name in mean)
    raised = sum(int((mean[name] < LEAST_LOG_VARIANCE).sum()) for name in log_variances)
    if not raised:
        return mean, 0

    def fetch(name: str, begin: int, end: int) -> Tensor:
        piece = piece_of(mean, name, begin, end)
        return piece.clamp(min=LEAST_LOG_VARIANCE) if name in log_variances else piece

    return LazyParams(forms_of(mean), fetch), raised


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite, in one pass: a finite sum has no NaN and no infinity in it.

    Example:
        >>> is_finite(torch.tensor([1.0, float("nan")])), is_finite(torch.full((9,), 3e38))
        (False, True)
    """
    if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())  # a sum of large numbers may overflow where none of them is infinite


def _check_evidence(
    client: str, notes: LazyParams | Params, num_examples: float, contract: Contract
) -> Geometry | None:
    found: Geometry | None = None
    for kind in contract.evidence:
        try:
            if flaw := kind.check(notes, num_examples):
                raise Refused(client, flaw.field, flaw.got, flaw.expected)
            found = kind.geometry(notes) or found
        except Refused:
            raise
        except (FuseError, ArithmeticError, RuntimeError) as why:
            raise Refused(client, kind.name, f"not usable ({why})", "sound evidence") from why
    return found


def _fair(
    updates: list[ClientUpdate], ratio: float, enrolled: Mapping[str, int], refused: list[dict[str, str]]
) -> list[ClientUpdate]:
    """Nobody may claim far more than the others: in examples unless it enrolled with them, and in steps for them."""
    if not updates:
        return updates
    typical = {claim: statistics.median(getattr(u, claim) for u in updates) for claim in ("num_examples", "steps")}
    fair = []
    for u in updates:
        room = ratio * max(1.0, u.num_examples / typical["num_examples"] if u.client in enrolled else 1.0)
        over = [claim for claim, median in typical.items() if getattr(u, claim) > room * median]
        if over:
            words = f"at most {room * typical[over[0]]:g}, {room:g} times the median"
            refused.append(Refused(u.client, over[0], getattr(u, over[0]), words).facts())
        else:
            fair.append(u)
    return fair
