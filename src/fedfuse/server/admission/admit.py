"""The door: all that clients send is judged here, once; what is behind it trusts a `ClientUpdate` and checks nothing.

The checks of one reply (`admit`) go from cheap to dear, so that a hostile reply costs little: its size before anything
is read → its table of contents before anything is allocated → message, round and network → names, shapes and dtypes
equal to the brief's → numbers of examples and steps in range → every number finite and possible (`values`) → each piece
of evidence by its own check. Over a round (`admit_all`): one reply per client, and no client's influence far above
the others' (`influence`). Whatever is wrong ends in a refusal that names client, field, what came and what was
expected, and the round goes on without that client. Nothing is unpickled, and nothing a reply names is imported.

Read next: `values`, `influence`; for files that no server asked for, `opened`, `agreed` and `updates`.
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
from fedfuse.server.admission.influence import Baseline, Claims, Lever, keep_within_bounds, measure
from fedfuse.server.admission.values import check_values, form_words, raise_log_variances
from fedfuse.wire.codec import LazyParams, Limits, Malformed, Packet, decode, encode, forms_of, forms_size, read
from fedfuse.wire.messages import NOTE, VERSION, split
from fedfuse.wire.sums import SUM, Summed, SummedParams, find_odd_mean, sum_forms

# The header of a reply and a tensor's line in its table of contents take a few hundred bytes; these are generous, and
# still bound what is parsed before anything is known of the reply.
_HEADER_BYTES = 65_536
_ENTRY_BYTES = 512
# More examples than anyone has, and few enough that a sum over clients and its product with a weight stay exact enough:
# 10¹² × 10³ clients < 2⁵³.
_MAX_EXAMPLES = 10**12
_MAX_STEPS = 10**9
# What a client says of itself goes into the ledger: a few short entries, and numbers that JSON and a plot can take.
_MOST_FACTS, _FACT_NAME, _LARGEST_FACT = 16, 40, 1e300


@dataclass(frozen=True, slots=True)
class Rules:
    """What a server insists on.

    Attributes:
        quorum: the share of asked clients that must be admitted for the round to count.
        examples_ratio: where it is the client's own word, a num_examples may be at most this multiple of the round's
            median; so may a number of local steps where clients were not told how to train.
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
    """What one client's reply to one brief must look like; made once for all clients that get the same brief.

    Attributes:
        round: the round asked for.
        spec: the network.
        network: the network as a header names it.
        forms: of every tensor that must come, evidence under its mark.
        evidence: the kinds asked for.
        roles: what each tensor of the network is for.
        limits: the size that no good reply exceeds.
        start: the weights the client began with; None where that is not known.
        enrolled: the most examples it may claim.
        training: how it was told to train.
        standing: the weights of each update where clients do not train and send none.
        sums_by: by what clients weigh in sums of several sites, where such are admitted.
        baseline: what moves are measured against, where clients train.
    """

    round: int
    spec: Spec
    network: Mapping[str, Any]
    forms: Mapping[str, Form]
    evidence: tuple[Evidence, ...]
    roles: Mapping[str, str]
    limits: Limits
    start: Params | None = None
    enrolled: int | None = None
    training: LocalSettings | None = None
    standing: Params | None = None
    sums_by: str | None = None
    baseline: Baseline | None = None

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

        Where it is not `anchored`, the client began elsewhere than with the brief's weights, and where is not known.
        """
        spec, layout, start = brief.spec, brief.spec.layout, brief.params if anchored else None
        own = forms_of(brief.params) if trains else {}
        forms = dict(own)
        for kind in evidence:
            forms |= {NOTE + n: form for n, form in kind.expects(brief).items()}
        # Names stand in the table of contents, and the network stands in the header, escaped as JSON in JSON.
        header = _HEADER_BYTES + _ENTRY_BYTES * len(forms) + sum(map(len, forms)) + len(spec.to_text()) * 2
        limits = Limits(bytes=forms_size(forms) + header, header=header, tensors=len(forms) + 1)
        return cls(
            round=brief.round,
            spec=spec,
            network=spec.to_json(),
            forms=forms,
            evidence=evidence,
            roles=layout.roles,
            limits=limits,
            start=start,
            training=training,
            standing=None if trains else brief.params,
            baseline=Baseline.of(own, layout, start) if trains else None,
        )


class Spool:
    """Keeps payloads in memory up to a limit, and in a temporary folder beyond it.

    The folder disappears with the spool, so a reader of the files must hold on to it.

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


def _size(envelope: Envelope) -> int:
    payload = envelope.payload
    if isinstance(payload, Path):
        return payload.stat().st_size if payload.exists() else 0
    return 0 if payload is None else len(payload) if isinstance(payload, bytes) else payload.size


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
        evidence: what was asked in addition to the weights.
        asked: which clients were asked.
        rules: what the server insists on.
        enrolled: how many examples each client has declared beforehand.
        opened: replies that had to be opened before, by client; their payloads are not read again.
        training: how clients were told to train, where they were told.
        trains: whether they were asked to train at all; if not, they send no weights.
        own_word: clients whose number of examples is only their own word; by default all that did not enrol.
        anchored: whether clients began with the brief's weights.
        unsent: clients whose replies are the server's own and travel nowhere, so that their bytes do not count.
    """
    rules, enrolled, opened = rules or Rules(), enrolled or {}, opened or {}
    admission, updates = Admission(Cohort(()), Spool(rules.memory)), dict[str, ClientUpdate]()
    expected, levers = frozenset(asked), dict[str, Mapping[str, Lever]]()
    common = Contract.of(brief.to(""), evidence, training, trains=trains, anchored=anchored)
    common = replace(common, sums_by=rules.sums_by)
    for envelope in envelopes:
        client = envelope.client
        admission.seconds += envelope.seconds
        if envelope.payload is None:
            if envelope.late is None:
                admission.dropped.append({"client": client, "reason": envelope.dropped})
            else:
                answer, words = f"an answer to round {envelope.late + 1}", "one that came before that round was closed"
                admission.refused.append(Refused(client, "reply", answer, words).facts())
            continue
        admission.bytes_up += 0 if client in unsent else _size(envelope)
        admission.remembered += envelope.remembered
        admission.trained += not envelope.remembered
        try:
            if client in updates:
                raise Refused(client, "reply", "a second one", "one reply per client and round")
            if client not in expected:
                raise Refused(client, "client", "a stranger", "a client that was asked in this round")
            heard, contract = brief.to(client), common
            if client in brief.own:
                contract = Contract.of(heard, evidence, training, trains=trains, anchored=anchored)
            if client in enrolled:
                contract = replace(contract, enrolled=enrolled[client])
            packet, moves = opened.get(client), dict[str, float]()
            spooled = envelope if packet else admission.spool.keep(envelope, contract.limits.bytes)
            update = admit(spooled, contract, packet, moves)
            levers[client], updates[client] = _measure(update, heard, contract, moves), update
        except Refused as why:
            admission.refused.append(why.facts())
            envelope.on_refused()
    claims = Claims(
        told=training if rules.told_steps and trains else None,
        own_word=updates.keys() - enrolled.keys() if own_word is None else own_word,
        ratio=rules.examples_ratio,
        believed=rules.believes,
        exact=not trains,
    )
    starts = dict[str, Params]()
    if anchored and trains:
        for client in updates:
            starts[client] = brief.to(client).params
    bounded = keep_within_bounds(list(updates.values()), levers, claims, rules.bounds, starts)
    admission.refused += bounded.refused
    return replace(admission, cohort=Cohort.of(bounded.updates), clipped=bounded.clipped)


def _measure(update: ClientUpdate, heard: Brief, contract: Contract, moves: Mapping[str, float]) -> dict[str, Lever]:
    """The client's levers. Evidence that passed its check may still overflow or not decompose when it is measured."""
    anchored = contract.start is not None
    sent = moves if contract.standing is None else None  # else the reply had no weights: its moves are of notes alone
    try:
        return measure(update, heard, contract.evidence, anchored, contract.baseline, sent)
    except (FuseError, ArithmeticError, RuntimeError) as why:
        raise Refused(update.client, "influence", f"not measurable ({why})", "sound evidence") from why


def admit(
    envelope: Envelope, contract: Contract, packet: Packet | None = None, lengths: dict[str, float] | None = None
) -> ClientUpdate:
    """Untrusted to trusted, or `Refused`; one client's fault never ends a round.

    Args:
        envelope: what came.
        contract: what was asked.
        packet: what came, where it has been opened before.
        lengths: filled with how far each tensor moved, since all numbers are read here.

    Raises:
        Refused: naming the client, the field, what came and what was expected.
    """
    client = envelope.client
    packet = packet or _open(envelope, contract)
    header = packet.header
    _check_header(client, header, contract)
    sums = _read_sums(client, header, contract.sums_by)
    of_weights = sums is not None and sums.by != "evidence"  # such a sum carries its float64 totals as notes
    expected = {**contract.forms, **sum_forms(contract.forms)} if of_weights else contract.forms
    _check_forms(client, packet.tensors.forms, expected)
    num_examples = _read_num_examples(client, header, contract)
    training = _read_training(client, header, contract)
    steps = _read_steps(client, header, contract, training)
    own, notes = split(packet)
    try:
        found = check_values(client, packet.tensors, contract.roles, contract.start, steps)
    except Malformed as why:
        raise Refused(client, "reply", str(why), "a file that stays as it is") from why
    if lengths is not None:
        lengths.update(found)
    if sums is not None and of_weights:
        own, notes = _attach_sums(client, own, notes, sums)
    geometry = _check_evidence(client, notes, num_examples, contract)
    mean, raised = raise_log_variances(own if contract.standing is None else contract.standing, contract.roles)
    posterior = Posterior(mean, geometry) if geometry is not None else Posterior(mean)
    facts = _read_facts(header) | ({"raised_variances": float(raised)} if raised else {})
    sites = 1 if sums is None else sums.sites
    return ClientUpdate(client, posterior, num_examples, steps, contract.spec, notes, facts, training, sites)


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
    if header.get("spec") == contract.network:
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
    """A name that a client chose, fit for a log."""
    return name if name and name.isprintable() and len(name) <= 80 else ascii(name)[:80]


def _read_sums(client: str, header: Mapping[str, Any], by: str | None) -> Summed | None:
    """What a reply says of the sites it sums, None of one site's own; `by` is what the method's sums weigh by."""
    try:
        found = Summed.of(header)
    except Malformed as why:
        raise Refused(client, "sums", str(why), "what `fedfuse fuse --partial` writes") from why
    if found is None or found.by == by:
        return found
    came = f"a sum of {found.sites} sites by {found.by}"
    words = "one client's own reply" if by is None else f"a sum by {by}, as this method takes it"
    raise Refused(client, "sums", came, words)


def _attach_sums(client: str, mean: LazyParams, notes: LazyParams, sums: Summed) -> tuple[LazyParams, LazyParams]:
    """The mean that knows the sum it was rounded from, and the notes without that sum."""
    totals = notes.part(lambda n: n.startswith(SUM), lambda n: n.removeprefix(SUM))
    if odd := find_odd_mean(mean, totals, sums.weight):
        raise Refused(client, odd, "not its sum divided by the weight", "the mean of the sum beside it")
    return SummedParams(mean, totals, sums.weight), notes.part(lambda n: not n.startswith(SUM))


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
    """How many steps it took: none where clients do not train, or where the settings have no epochs."""
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
    if contract.training is None or claimed == contract.training:
        return claimed
    theirs, ours = claimed.to_json(), contract.training.to_json()
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            raise Refused(client, f"training.{key}", theirs.get(key), f"{ours.get(key)}, as it was told")
    return contract.training  # they differ in what no header says, such as the device


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


def _read_facts(header: Mapping[str, Any]) -> dict[str, float]:
    """Loss and the like: kept if they are plain numbers, for the ledger only."""
    facts, sent = dict[str, float](), header.get("facts")
    for name, value in list(sent.items())[:_MOST_FACTS] if isinstance(sent, dict) else ():
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_FACT:
            facts[_printable(name[:_FACT_NAME])] = float(value)
    return facts
