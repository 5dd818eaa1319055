"""The door: everything a client sends is judged here, once, and nobody behind it checks again.

In order: size before anything is read → the table of contents before anything is allocated → round, network, names,
shapes and dtypes equal to the brief's → numbers of examples and steps in range → values finite → each piece of evidence
by its own check → one reply per client → nobody's levers far above the others' (`bounds`). A refusal names client,
field, what came and what was expected; the round goes on.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Envelope, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Geometry, Posterior
from fedfuse.core.seams import Evidence
from fedfuse.core.settings import Bounds, LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, FuseError, Refused
from fedfuse.server.admission.influence import (
    Claims,
    Lengths,
    Lever,
    attach_sums,
    forms_with_sums,
    keep_within_bounds,
    measure,
    read_sums,
)
from fedfuse.server.admission.values import check_values, form_words, lengths_of, raise_log_variances
from fedfuse.wire.codec import (
    LazyParams,
    Limits,
    Malformed,
    Packet,
    decode,
    encode,
    forms_of,
    forms_size,
    read,
)
from fedfuse.wire.messages import NOTE, VERSION, split


class Spool:
    """Keeps payloads in memory up to a limit, and in a temporary folder beyond it.

    The folder disappears with the spool, so whoever reads the files must hold on to it.

    Example:
        >>> spool = Spool(limit=4)
        >>> isinstance(spool.keep(Envelope("a", b"123")).payload, bytes)
        True
        >>> isinstance(spool.keep(Envelope("b", b"45")).payload, Path)
        True
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes_in_memory = 0
        self._files = 0
        self._folder: Path | None = None

    def keep(self, envelope: Envelope, largest: int | None = None) -> Envelope:
        """The envelope itself, or one whose payload is a file; a payload larger than allowed is left to the door."""
        payload, size = envelope.payload, _size(envelope)
        if payload is None or isinstance(payload, Path) or (largest is not None and size > largest):
            return envelope
        if self._bytes_in_memory + size <= self.limit:
            self._bytes_in_memory += size
            return envelope
        self._files += 1
        try:
            path = self._waiting_folder() / f"{self._files}.safetensors"
            path.write_bytes(payload if isinstance(payload, bytes) else encode(payload.tensors, payload.header))
        except OSError as why:
            raise ConfigError(
                f"updates that outgrow memory cannot wait in {tempfile.gettempdir()}: {why.strerror or why}; "
                "free some space, name another folder in TMPDIR or raise the memory limit"
            ) from why
        return replace(envelope, payload=path)

    def _waiting_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedfuse-spool-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


_HEADER_BYTES = 65_536  # our own header, generously
_ENTRY_BYTES = 512  # a tensor's line in the table of contents, generously
_MAX_EXAMPLES = 10**12  # more examples than anybody has, and far below where a sum of num_examples could overflow
_MAX_STEPS = 10**9


@dataclass(frozen=True, slots=True)
class Rules:
    """What a server insists on.

    Attributes:
        quorum: the share of asked clients that must be admitted for the round to count.
        examples_ratio: where it is the client's own word, a num_examples may be at most this multiple of the round's
            median; so may a number of local steps where nobody said how to train.
        bounds: how far above the others any other lever may be.
        told_steps: whether steps follow from examples and settings where the server gave those; not for clients that
            train as they like.
        believes: whether clients' own numbers of examples count as they are, up to what is absurd, as on a grid whose
            nodes its operator let in; else those that no operator vouches for are held to the others'.
        memory: bytes of admitted updates held in memory; the rest is kept in files.
        trusted: model factories outside fedfuse that the user named.
        sums_by: by what clients weigh in sums of several sites, where such are admitted: never in a live round.
    """

    quorum: float = 0.5
    examples_ratio: float = 10.0
    bounds: Bounds = field(default_factory=Bounds)
    told_steps: bool = True
    believes: bool = False
    memory: int = 2 * 2**30
    trusted: frozenset[str] = frozenset()
    sums_by: str | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """What one client's reply to one brief must look like."""

    round: int
    spec: Spec
    forms: Mapping[str, Form]
    evidence: tuple[Evidence, ...]
    roles: Mapping[str, str]
    limits: Limits
    start: Params | None = None
    enrolled: int | None = None
    training: LocalSettings | None = None
    standing: Params | None = None  # the weights of everybody's update, where nobody trains and sends any
    sums_by: str | None = None  # by what clients weigh in sums of several sites, where such are admitted
    begun: Mapping[str, float] = field(default_factory=dict)  # how long the start's tensors are

    @classmethod
    def of(
        cls,
        brief: Brief,
        evidence: tuple[Evidence, ...],
        training: LocalSettings | None = None,
        *,
        trains: bool = True,
        anchored: bool = True,
    ) -> Contract:
        """The contract that follows from a brief as a client hears it, and from how it was told to train.

        Where it is not `anchored`, the client began elsewhere than with the brief's weights, nobody knows where.
        """
        forms = dict(forms_of(brief.params)) if trains else {}
        for kind in evidence:
            forms |= {NOTE + n: form for n, form in kind.expects(brief).items()}
        limits = _limits(forms, brief.spec)
        start, standing = brief.params if anchored else None, None if trains else brief.params
        begun = {} if start is None else lengths_of(start)
        roles = brief.spec.layout.roles
        return cls(
            brief.round, brief.spec, forms, evidence, roles, limits, start, None, training, standing, begun=begun
        )


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
    clipped: list[dict[str, str]] = field(default_factory=list)
    dropped: list[dict[str, str]] = field(default_factory=list)
    bytes_up: int = 0
    seconds: float = 0.0
    trained: int = 0
    remembered: int = 0

    def count(self, envelope: Envelope, sent: bool) -> None:
        """Add a reply to the numbers; what a server sends itself has not been sent."""
        self.bytes_up += _size(envelope) if sent else 0
        self.remembered += envelope.remembered
        self.trained += not envelope.remembered


def admit(
    envelope: Envelope, contract: Contract, packet: Packet | None = None, lengths: dict[str, float] | None = None
) -> ClientUpdate:
    """Untrusted to trusted, or `Refused`; one client's fault never ends a round.

    Args:
        envelope: what came.
        contract: what was asked.
        packet: what came, opened, if somebody has.
        lengths: filled with how long the tensors' ways from the start are, which all numbers were read for.

    Raises:
        Refused: naming the client, the field, what came and what was expected.
    """
    client = envelope.client
    packet = packet or _open(envelope, contract)
    _check_header(client, packet.header, contract)
    sums = read_sums(client, packet.header, contract.sums_by)
    _check_forms(client, packet.tensors.forms, forms_with_sums(contract.forms, sums))
    num_examples = _read_num_examples(client, packet.header, contract)
    training = _read_training(client, packet.header, contract)
    steps = _read_steps(client, packet.header, contract, training)
    own, notes = split(packet)
    try:
        found = check_values(client, packet.tensors, contract.roles, contract.start, steps)
    except Malformed as why:
        raise Refused(client, "reply", str(why), "a file that stays as it is") from why
    if lengths is not None:
        lengths.update(found)
    own, notes = attach_sums(client, own, notes, sums)
    geometry = _check_evidence(client, notes, num_examples, contract)
    mean, raised = raise_log_variances(own if contract.standing is None else contract.standing, contract.roles)
    posterior = Posterior(mean, geometry) if geometry is not None else Posterior(mean)
    facts = _read_facts(packet.header) | ({"raised_variances": float(raised)} if raised else {})
    sites = 1 if sums is None else sums.sites
    return ClientUpdate(client, posterior, num_examples, steps, contract.spec, notes, facts, training, sites)


def admit_all(
    envelopes: Iterable[Envelope],
    brief: Brief,
    evidence: tuple[Evidence, ...],
    asked: Iterable[str],
    rules: Rules | None = None,
    enrolled: Mapping[str, int] | None = None,
    opened: Mapping[str, Packet] | None = None,
    training: LocalSettings | None = None,
    trains: bool = True,
    own_word: AbstractSet[str] | None = None,
    anchored: bool = True,
    unsent: AbstractSet[str] = frozenset(),
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
        trains: whether they were asked to train at all; if not, they send no weights.
        own_word: whose number of examples nobody else vouches for; by default everybody's who did not enrol.
        anchored: whether clients began with the brief's weights.
        unsent: whose replies are the server's own and travel nowhere, so that their bytes do not count.
    """
    rules, enrolled, opened = rules or Rules(), enrolled or {}, opened or {}
    admission, updates = Admission(Cohort(()), Spool(rules.memory)), dict[str, ClientUpdate]()
    expected, levers = frozenset(asked), dict[str, Mapping[str, Lever]]()
    common = Contract.of(brief.to(""), evidence, training, trains=trains, anchored=anchored)
    common = replace(common, sums_by=rules.sums_by)
    for envelope in envelopes:
        admission.seconds += envelope.seconds
        if envelope.payload is None:
            _note_absence(envelope, admission)
            continue
        admission.count(envelope, sent=envelope.client not in unsent)
        try:
            _check_turn(envelope.client, expected, updates)
            heard, own = brief.to(envelope.client), envelope.client in brief.own
            contract = Contract.of(heard, evidence, training, trains=trains, anchored=anchored) if own else common
            if envelope.client in enrolled:
                contract = replace(contract, enrolled=enrolled[envelope.client])
            packet, moves = opened.get(envelope.client), dict[str, float]()
            spooled = envelope if packet else admission.spool.keep(envelope, contract.limits.bytes)
            update = admit(spooled, contract, packet, moves)
            levers[update.client], updates[update.client] = _measure(update, heard, contract, moves), update
        except Refused as why:
            admission.refused.append(why.facts())
            envelope.on_refused()
    doubtful = updates.keys() - enrolled.keys() if own_word is None else own_word
    claims = _claims(rules, training, doubtful, trains)
    begun = _starts(brief, updates if anchored and trains else ())
    bounded = keep_within_bounds(list(updates.values()), levers, claims, rules.bounds, begun)
    admission.refused += bounded.refused
    return replace(admission, cohort=Cohort.of(bounded.updates), clipped=bounded.clipped)


def _claims(rules: Rules, training: LocalSettings | None, doubtful: AbstractSet[str], trains: bool) -> Claims:
    """What is known of examples and steps; sums are taken as they are, or not at all."""
    told = training if rules.told_steps and trains else None
    return Claims(told, doubtful, rules.examples_ratio, exact=not trains, believed=rules.believes)


def _starts(brief: Brief, clients: Iterable[str]) -> dict[str, Params]:
    """Where each client began."""
    return {client: brief.to(client).params for client in clients}


def _note_absence(envelope: Envelope, admission: Admission) -> None:
    """Write down why a client brought nothing: it could not, or it was too late for a round that is closed."""
    if envelope.late is None:
        admission.dropped.append({"client": envelope.client, "reason": envelope.dropped})
        return
    answer, words = f"an answer to round {envelope.late + 1}", "one that came before that round was closed"
    admission.refused.append(Refused(envelope.client, "reply", answer, words).facts())


def _measure(update: ClientUpdate, heard: Brief, contract: Contract, moves: Mapping[str, float]) -> dict[str, Lever]:
    try:
        lengths = Lengths(moves, contract.begun) if contract.standing is None else None
        return measure(update, heard, contract.evidence, contract.start is not None, lengths)
    except (FuseError, ArithmeticError, RuntimeError) as why:
        raise Refused(update.client, "influence", f"not measurable ({why})", "sound evidence") from why


def _size(envelope: Envelope) -> int:
    payload = envelope.payload
    if isinstance(payload, Path):
        return payload.stat().st_size if payload.exists() else 0
    return 0 if payload is None else len(payload) if isinstance(payload, bytes) else payload.size


def _check_turn(client: str, asked: frozenset[str], updates: Mapping[str, ClientUpdate]) -> None:
    if client in updates:
        raise Refused(client, "reply", "a second one", "one reply per client and round")
    if client not in asked:
        raise Refused(client, "client", "a stranger", "a client that was asked in this round")


def _open(envelope: Envelope, contract: Contract) -> Packet:
    try:
        if isinstance(envelope.payload, bytes):
            return decode(envelope.payload, contract.limits)
        if isinstance(envelope.payload, Path):
            return read(envelope.payload, contract.limits)
        if isinstance(envelope.payload, Packet):  # of this process: its numbers are judged as all others are
            if envelope.payload.size > contract.limits.bytes:
                raise Malformed(
                    f"{envelope.payload.size:,} bytes are more than the {contract.limits.bytes:,} that fit here"
                )
            return envelope.payload
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


def _read_num_examples(client: str, header: Mapping[str, Any], contract: Contract) -> float:
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


def _read_steps(client: str, header: Mapping[str, Any], contract: Contract, training: LocalSettings | None) -> int:
    """How many steps it took: none where nobody trains, or where the settings have no epochs."""
    steps = header.get("steps")
    rests = contract.standing is not None or (training is not None and not training.epochs)
    least, most = (0, 0) if rests else (1, _MAX_STEPS)
    if not isinstance(steps, int) or isinstance(steps, bool) or not least <= steps <= most:
        words = "0, for there was nothing to train" if rests else f"a whole number from 1 to {_MAX_STEPS:,}"
        raise Refused(client, "steps", repr(steps), words)
    return steps


def _read_training(client: str, header: Mapping[str, Any], contract: Contract) -> LocalSettings | None:
    """How the client says it trained; where the server told it how, it must have trained so."""
    if "training" not in header:
        return contract.training
    try:
        claimed = LocalSettings.from_json(header["training"])
    except ConfigError as why:
        raise Refused(client, "training", str(why), "the settings it trained with") from why
    if contract.training is None:
        return claimed
    theirs, ours = claimed.to_json(), contract.training.to_json()
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            raise Refused(client, f"training.{key}", theirs.get(key), f"{ours.get(key)}, as it was told")
    return contract.training


def _read_facts(header: Mapping[str, Any]) -> dict[str, float]:
    """Loss and the like: kept if they are plain numbers, for the ledger only."""
    facts = header.get("facts")
    if not isinstance(facts, dict):
        return {}
    plain = {_printable(k[:40]): v for k, v in list(facts.items())[:16] if isinstance(v, int | float)}
    return {k: float(v) for k, v in plain.items() if not isinstance(v, bool) and abs(v) < 1e300}


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
