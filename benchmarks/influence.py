"""How much can one admitted client of ten do? Methods × levers × guards, on digits.

Run `python benchmarks/influence.py [--full] [--seeds N …] [--alphas A …] [--json FILE] [--methods NAME …]
[--guards NAME …] [--levers NAME …]`, or `--table FILE …` for the table of the threat model from such JSON. After honest
rounds of FedAvg the tenth client turns: it sends what it learned from its rows under the label 0, as long a move as its
honest one, or walks back, each with honest evidence, and pulls one lever: it multiplies what scales its say by every
factor of a ladder up to a million. Each reply passes the real door with its default bounds. What is shown for a lever
is the worst that any rung does in three rounds: the accuracy lost against the same rounds without the tenth client, in
points, the rung that did it, from which rung on it is refused, and the least share of honest clients that were kept.
One seed takes two minutes, `--full` takes five seeds and two partitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data.partitions import partition
from fedfuse.data.schemes import Dirichlet
from fedfuse.data.sources import load
from fedfuse.errors import FuseError
from fedfuse.linalg.psd import pack
from fedfuse.nets.kronecker import blocks_of, unpack_triangle
from fedfuse.server.admission.admit import Admission, admit_all
from fedfuse.server.filters import with_filters
from fedfuse.server.judge import log_probabilities
from fedfuse.server.round import fuse_round
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode, encode
from fedfuse.wire.messages import NOTE

CLIENTS, CLASSES, FEATURES = 10, 10, 64
SPEC = Spec("mlp", {"inputs": FEATURES, "hidden": [32], "classes": CLASSES})
LOCAL = LocalSettings(epochs=5, batch_size=16, optimizer={"lr": 0.1, "momentum": 0.5})
BEFORE, ROUNDS = 6, 3  # honest rounds of FedAvg, and rounds with the tenth client
LADDER = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0, 1e6)
GUARDS = {"none": None, "krum": {"name": "krum", "byzantine": 1}, "median": "median"}

Message = tuple[dict[str, Tensor], dict[str, object]]  # tensors and header of a reply
Pull = Callable[[Message, Brief, float], Message]


def scale_notes(kind: str, message: Message, brief: Brief, factor: float) -> Message:  # noqa: ARG001
    tensors, header = message
    mine = {n: t * factor for n, t in tensors.items() if n.startswith(f"{NOTE}{kind}/") and t.is_floating_point()}
    return tensors | mine, header


def scale_move(message: Message, brief: Brief, factor: float) -> Message:
    tensors, header = message
    floats = {n: p for n, p in brief.params.items() if p.is_floating_point()}
    return tensors | {n: p + factor * (tensors[n] - p) for n, p in floats.items()}, header


def walk_back(message: Message, brief: Brief, factor: float) -> Message:
    return scale_move(message, brief, -factor)


def claim_few_weights(message: Message, brief: Brief, factor: float) -> Message:
    """All of a tensor's Fisher information on so small a part of its weights: those that moved furthest."""
    tensors, header = message
    mine = {}
    for name in (n for n in tensors if n.startswith(f"{NOTE}fisher/")):
        weight, fisher = name.removeprefix(f"{NOTE}fisher/"), tensors[name]
        move = (tensors[weight] - brief.params[weight]).abs().flatten()
        few = move.topk(max(1, round(len(move) / factor))).indices
        told = torch.zeros_like(move).index_fill(0, few, float(fisher.double().sum()) / len(few))
        mine[name] = told.view(fisher.shape).to(fisher.dtype)
    return tensors | mine, header


def claim_one_direction(message: Message, brief: Brief, factor: float) -> Message:
    """Factors of the same trace, turned ever more towards the direction in which the layer moved furthest."""
    tensors, header = message
    mine = {}
    for block in blocks_of(brief.spec):
        (move,) = (block.matrices(tensors) - block.matrices(brief.params)).double()
        U, _, Vh = torch.linalg.svd(move, full_matrices=False)
        for side, along in (("in", Vh[0]), ("out", U[:, 0])):
            name = f"{NOTE}kron/{block.name}/{side}"
            matrix = unpack_triangle(tensors[name]).double()
            turned = matrix / factor + (1 - 1 / factor) * matrix.trace() * torch.outer(along, along)
            mine[name] = pack(turned).float()
    return tensors | mine, header


def scale_weights(message: Message, brief: Brief, factor: float) -> Message:
    tensors, header = message
    return tensors | {n: tensors[n] * factor for n, p in brief.params.items() if p.is_floating_point()}, header


def shift_variances(sign: int, message: Message, brief: Brief, factor: float) -> Message:
    tensors, header = message
    names = brief.spec.layout.with_role("log_variance")
    by = sign * float(torch.tensor(factor, dtype=torch.float64).log())
    return tensors | {n: (tensors[n] + by).clamp(-30, 20) for n in names}, header


def scale_number(key: str, message: Message, brief: Brief, factor: float) -> Message:  # noqa: ARG001
    tensors, header = message
    value = float(header[key]) * factor  # type: ignore[arg-type]
    return tensors, header | {key: max(1, int(value)) if key == "steps" else value}


def more_examples(message: Message, brief: Brief, factor: float) -> Message:
    """More examples, and as many steps as they would have taken."""
    return scale_number("steps", scale_number("num_examples", message, brief, factor), brief, factor)


def pull_all(pulls: tuple[Pull, ...], message: Message, brief: Brief, factor: float) -> Message:
    """Several levers at once."""
    for pull in pulls:
        message = pull(message, brief, factor)
    return message


def fewer_steps(message: Message, brief: Brief, factor: float) -> Message:
    return scale_number("steps", message, brief, 1 / factor)


EVERY: dict[str, Pull] = {
    "examples": more_examples,
    "move": scale_move,
    "walk back": walk_back,
}
POSTERIOR = {"precision": partial(shift_variances, -1), "variance": partial(shift_variances, 1)}
METHODS: dict[str, tuple[str, dict[str, object], dict[str, Pull]]] = {
    "fedavg": ("fedavg", {}, {}),
    "fedavgm": ("fedavgm", {}, {}),
    "fednova": ("fednova", {}, {"steps": partial(scale_number, "steps"), "fewer steps": fewer_steps}),
    "scaffold": ("scaffold", {}, {"control": partial(scale_notes, "control")}),
    "qfedavg": ("qfedavg", {}, {"start loss": partial(scale_notes, "start_loss")}),
    "swa": ("swa", {}, {"weights": scale_weights}),
    "fedlpa": ("fedlpa", {}, {"factors": partial(scale_notes, "kron"), "one direction": claim_one_direction}),
    "laplace": ("laplace", {}, {"fisher": partial(scale_notes, "fisher"), "few weights": claim_few_weights}),
    **{name: (name, {}, POSTERIOR) for name in ("eaa", "gaa", "aalv", "wb", "rklb", "fklb")},
}


OWN_WORD = ("examples", "all at once")  # where numbers of examples are nobody's word but the client's


def levers_of(method: str) -> dict[str, Pull]:
    """What a client of a method can pull: each lever, and examples, move and the method's own together."""
    own = METHODS[method][2]
    together = (more_examples, scale_move, *list(own.values())[:1])
    return EVERY | own | {"all at once": partial(pull_all, together)}


@dataclass(frozen=True, slots=True)
class Row:
    """The worst that one lever does to one method behind one guard."""

    method: str
    lever: str
    guard: str
    seed: int
    alpha: float
    honest: float
    lost: float
    factor: float
    kept: float
    refused_from: float | None
    ended: str = ""


@dataclass(slots=True)
class World:
    """Nine honest clients and one that is not, on one seed."""

    recipe: Recipe
    seed: int
    alpha: float
    rows: dict[str, Rows] = field(init=False)
    test: Rows = field(init=False)
    bench: Bench = field(init=False)
    start: ServerState = field(init=False)
    _first: dict[str, bytes] = field(default_factory=dict)
    _memories: dict[str, Params] = field(default_factory=dict)

    def __post_init__(self) -> None:
        data = load("digits")
        parts = partition(data.train.y, Dirichlet(alpha=self.alpha), CLIENTS, self.seed)
        self.rows = {c: Rows(data.train.x[i].flatten(1), data.train.y[i]) for c, i in parts.clients.items()}
        self.test = Rows(data.test.x.flatten(1), data.test.y)
        self.bench = Bench(population=CLIENTS, classes=CLASSES, local=LOCAL, seed=self.seed)
        torch.manual_seed(self.seed)
        self.start = self.recipe.begin_round(self.warmed(ServerState(0, Single.of(SPEC.build(), SPEC))), self.bench)

    def warmed(self, state: ServerState) -> ServerState:
        """The state of a federation that works: some rounds of FedAvg by everybody."""
        fedavg = find_method("fedavg").recipe()
        for _ in range(BEFORE):
            brief = state.brief((), CLASSES)
            sent = [
                Envelope(c, client_round(fedavg.work(LOCAL), brief, c, r, seed=self.seed).payload)
                for c, r in self.rows.items()
            ]
            cohort = admit_all(
                sent, brief, (), list(self.rows), enrolled={c: len(r) for c, r in self.rows.items()}, training=LOCAL
            ).cohort
            state = fuse_round(fedavg, cohort, state, self.bench)
        return replace(state, round=0)

    @property
    def liar(self) -> str:
        """The tenth client."""
        return list(self.rows)[-1]

    def replies(self, brief: Brief, memories: dict[str, Params]) -> dict[str, bytes]:
        """What everybody sends; the tenth client a poisoned move, as long as its honest one, with honest evidence."""
        found, work, own = dict[str, bytes](), self.recipe.work(LOCAL), self.rows[self.liar]
        poisoned = Rows(own.x, torch.zeros_like(own.y))
        for client, rows in self.rows.items():
            answer = client_round(work, brief, client, rows, memory=memories.get(client), seed=self.seed)
            found[client], memories[client] = answer.payload, answer.memory
        honest = decode(found[self.liar])
        false = client_round(replace(work, evidence=()), brief, self.liar, poisoned, seed=self.seed)
        message = dict(decode(false.payload).tensors), dict(decode(false.payload).header)
        lengths = [
            sum(float((m[n] - p).square().sum()) for n, p in brief.params.items()) for m in (honest.tensors, message[0])
        ]
        shortened, header = scale_move(message, brief, (lengths[0] / lengths[1]) ** 0.5)  # as long as its honest move
        found[self.liar] = encode(dict(honest.tensors) | shortened, header)
        return found

    def first(self, brief: Brief) -> tuple[dict[str, bytes], dict[str, Params]]:
        """The first round's replies, which do not depend on the lever, and what clients remember of it."""
        if not self._first:
            self._first = self.replies(brief, self._memories)
        return self._first, dict(self._memories)

    def run(self, pull: Callable[[bytes, Brief], bytes | None], own_word: bool) -> tuple[float, float, bool]:
        """Accuracy, the least share of honest clients kept, and whether the liar was let in every time."""
        state, kept, admitted = self.start, 1.0, True
        memories: dict[str, Params] = {}
        for number in range(ROUNDS):
            brief = state.brief(self.recipe.publishes, CLASSES)
            if number:
                replies = self.replies(brief, memories)
            else:
                replies, memories = self.first(brief)
            admission = self.admit(replies, pull, brief, own_word)
            cohort = admission.cohort
            kept = min(kept, sum(c != self.liar for c in cohort.clients) / (CLIENTS - 1))
            admitted &= self.liar in cohort.clients
            state = fuse_round(self.recipe, cohort, state, self.bench)
            if number + 1 < ROUNDS:
                state = self.recipe.begin_round(state, self.bench)
        right = log_probabilities(state.model, self.test.x)[:, :CLASSES].argmax(-1) == self.test.y
        return float(right.double().mean()), kept, admitted

    def admit(
        self, replies: Mapping[str, bytes], pull: Callable[[bytes, Brief], bytes | None], brief: Brief, own_word: bool
    ) -> Admission:
        """A round's replies through the door, the tenth client's as it likes."""
        sent = {c: pull(p, brief) if c == self.liar else p for c, p in replies.items()}
        envelopes = [Envelope(c, p) for c, p in sent.items() if p is not None]
        enrolled = {} if own_word else dict.fromkeys(sent, 10**9)
        return admit_all(envelopes, brief, self.recipe.evidence, list(sent), enrolled=enrolled, training=LOCAL)


def pulled(pull: Pull, factor: float, payload: bytes, brief: Brief) -> bytes:
    packet = decode(payload)
    tensors, header = pull((dict(packet.tensors), dict(packet.header)), brief, factor)
    return encode(tensors, header)


def rows_of(method: str, guard: str, seed: int, alpha: float, levers: Sequence[str] = ()) -> Iterator[Row]:
    name, options, _ = METHODS[method]
    recipe = with_filters(replace(find_method(name).recipe(**options)), guard=GUARDS[guard])
    world = World(recipe, seed, alpha)
    honest, _, _ = world.run(lambda _payload, _brief: None, own_word=False)
    for lever, pull in levers_of(method).items():
        if levers and lever not in levers:
            continue
        worst = Row(method, lever, guard, seed, alpha, honest, -1.0, 1.0, 1.0, None)
        for factor in LADDER:
            try:
                accuracy, kept, admitted = world.run(partial(pulled, pull, factor), own_word=lever in OWN_WORD)
            except FuseError as why:
                worst = replace(worst, lost=honest, factor=factor, ended=str(why)[:80])
                break
            kept = min(kept, worst.kept)
            if not admitted and worst.refused_from is None:
                worst = replace(worst, refused_from=factor)
            lost, at = max((worst.lost, worst.factor), (honest - accuracy, factor))
            worst = replace(worst, kept=kept, lost=lost, factor=at)
        yield worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seeds", nargs="*", type=int, help="default: 0, with --full 0 to 4")
    parser.add_argument("--alphas", nargs="*", type=float, help="default: 1.0, with --full 0.3 and 1.0")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", nargs="*", type=Path, help="write stored numbers as a table instead")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--guards", nargs="*", default=list(GUARDS))
    parser.add_argument("--levers", nargs="*", default=[], help="default: all")
    args = parser.parse_args()
    if args.table:
        stored = [Row(**row) for path in args.table for row in json.loads(path.read_text())]
        print("\n".join(table(stored)))
        return
    torch.set_num_threads(1)
    seeds = args.seeds or (range(5) if args.full else (0,))
    alphas = args.alphas or ((0.3, 1.0) if args.full else (1.0,))
    worlds = [(seed, alpha) for alpha in alphas for seed in seeds]
    found = []
    for method in args.methods:
        for guard in args.guards:
            each = [list(rows_of(method, guard, seed, alpha, args.levers)) for seed, alpha in worlds]
            for same in zip(*each, strict=True):
                found += same
                show(same)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    sys.exit(0)


def show(same: tuple[Row, ...]) -> None:
    """One line: the mean and the worst over seeds."""
    lost = [100 * row.lost for row in same]
    worst = max(same, key=lambda row: row.lost)
    refused = min((row.refused_from for row in same if row.refused_from is not None), default=None)
    honest = 100 * statistics.mean(row.honest for row in same)
    print(
        f"{worst.method:9} {worst.lever:12} {worst.guard:7} honest {honest:5.1f}  lost {statistics.mean(lost):5.1f} "
        f"worst {max(lost):5.1f} at ×{worst.factor:<5g} refused from ×{refused or '–':<5} "
        f"kept {100 * min(row.kept for row in same):3.0f} % {worst.ended}",
        flush=True,
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: per method and lever the mean over seeds and, in brackets, the worst; guards side by side."""
    guards = [g for g in GUARDS if any(row.guard == g for row in rows)]
    yield f"| method | honest, % | lever | {' | '.join('no guard' if g == 'none' else g for g in guards)} |"
    yield "|---|---:|---|" + "---:|" * len(guards)
    for method, lever in dict.fromkeys((row.method, row.lever) for row in rows):
        same = [row for row in rows if (row.method, row.lever) == (method, lever)]
        honest = statistics.mean(row.honest for row in same if row.guard == same[0].guard)
        first = f"`{method}` | {100 * honest:.1f}" if lever == "examples" else " | "
        yield f"| {first} | {lever} | {' | '.join(_cell([r.lost for r in same if r.guard == g]) for g in guards)} |"


def _cell(lost: Sequence[float]) -> str:
    if not lost:
        return "–"
    mean, worst = (max(0.0, 100 * x) for x in (statistics.mean(lost), max(lost)))
    return f"{mean:.1f} ({worst:.1f})"


if __name__ == "__main__":
    main()
