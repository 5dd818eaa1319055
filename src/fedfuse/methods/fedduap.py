"""Zhang et al., FedDUAP: Federated Learning with Dynamic Update and Adaptive Pruning, IJCAI 2022.

Two ideas for a server with labelled rows of its own, each a method, and both together. In round t

    client       w_k as in FedAvg, and its label counts                                                `LabelCounts`
    server       w ← Σ f_k w_k
    FedDU        w ← w + α (w_s − w), w_s being w trained on the server's rows, eqs. 2 to 5            `DynamicUpdate`
                 α = f′(acc) · n₀ D(P̄) / (n₀ D(P̄) + n′ D(P₀)) · C · decayᵗ                            `balance`
    FedAP, once  a pruning rate from the curvature of every client's loss, eq. 6                       `Rates`
                 filters of low rank go, until each layer has lost its share                           `FilterRanking`

n₀ and n′ are the numbers of rows of the server and of the cohort, D(P₀) and D(P̄) the Jensen–Shannon divergences of
their labels from those of all clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import ServerPart
from fedfuse.core.settings import Settings
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods._pruning import RANKING, RATES, FilterRanking, Rates
from fedfuse.nets.cost import count_server_work, training_passes
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.judge import accuracy_and_loss
from fedfuse.server.training import (
    MissingCounts,
    cohort_histogram,
    common_training,
    divergence,
    population_histogram,
    record_label_counts,
    train_on,
)

Need: TypeAlias = Literal["complement", "inverse"]
Skew: TypeAlias = Literal["cohort", "clients"]

_EVERYBODY = (
    "everybody takes part, so the cohort's labels are everybody's and FedDU takes no step: it is FedAvg to the last "
    'bit; ask fewer clients a round, or set divergence = "clients"'
)


@dataclass(frozen=True, slots=True)
class DynamicUpdate(ServerPart):
    """FedDU's server step (eqs. 2 to 5), in its interpolation form: w ← w + α (w_s − w).

    w_s is what the fused model w becomes when the server trains it on its own rows as a client would, in τ steps;
    α = f′(acc) · n₀ D(P̄) / (n₀ D(P̄) + n′ D(P₀)) · C · decayᵗ, at most 1. For plain SGD this is eq. 2,
    w − τ_eff η ḡ with τ_eff = α τ and ḡ the mean gradient of the τ steps. D is the divergence of a label histogram
    from that of all clients; acc is the accuracy of w on the server's rows. What a mask leaves out stays zero.

    Where all clients take part the cohort's labels are those of all, D(P̄) = 0 and α = 0: by its equation FedDU is then
    FedAvg, which the record says. `divergence = "clients"` takes the mean divergence of the cohort's clients instead,
    which is not zero under skew.

    Attributes:
        form: f′: 1 − acc, or 1/(acc + ε).
        C: the factor of eq. 5.
        decay: its base; the step fades as decayᵗ.
        epochs: E, the server's passes over its rows; None takes the clients'.
        batch_size: B; None takes the clients'.
        least: a smaller α is no step at all.
        explode: the step is taken back if it multiplies the loss on the server's rows by more than this.
        unheard: what clients that never answered are taken to have.
        divergence: what stands for D(P̄): that of the "cohort"'s labels together, or the mean of its "clients'", by
            their examples.
    """

    form: Need = "complement"
    C: float = 1.0
    decay: float = 0.999
    epochs: int | None = None
    batch_size: int | None = None
    least: float = 1e-3
    explode: float = 3.0
    unheard: MissingCounts = "uniform"
    divergence: Skew = "cohort"
    needs: ClassVar[frozenset[str]] = frozenset({"counts", "server_rows", "training", "network"})
    needs_classes: ClassVar[bool] = True

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Walk on the server's rows, as far as they are to be trusted."""
        rows, state = bench.need_rows("FedDU"), record_label_counts(state, cohort)
        accuracy, loss = accuracy_and_loss(state.single, rows)
        share, facts = self._share(state, cohort, bench, rows, accuracy)
        if share <= self.least:
            remark = {"remark": _EVERYBODY} if self._is_fedavg(len(cohort), bench) else {}
            why = _EVERYBODY if remark else f"alpha is {share:.2g}"
            state = count_server_work(state, len(rows), bench)
            return state.noting(server_step={**facts, "taken": False, "why": why}, **remark)
        # the server trains as the clients did, but for what it was given
        own: Mapping[str, int | None] = {"epochs": self.epochs, "batch_size": self.batch_size}
        given = {key: value for key, value in own.items() if value is not None}
        settings = common_training(cohort, bench, "FedDU", given).model_copy(update=given)
        trained = train_on(rows, state, settings, bench)
        state = count_server_work(state, 2 * len(rows) + training_passes(settings, len(rows), trained.steps), bench)
        moved = state.fused(interpolate(state.single.posterior.mean, trained.params, share))
        after = accuracy_and_loss(moved.single, rows)[1]
        taken = after <= self.explode * loss
        facts |= {"steps": trained.steps, "effective_steps": share * trained.steps}
        facts |= {"loss_before": loss, "loss_after": after, "taken": taken}
        return (moved if taken else state).noting(server_step=facts)

    def _share(
        self, state: ServerState, cohort: Cohort, bench: Bench, rows: Rows, accuracy: float
    ) -> tuple[float, dict[str, float]]:
        """α, and the numbers it is made of."""
        everyone = population_histogram(state.memory, bench.population, self.unheard)
        ours, theirs = divergence(rows.counts(bench.classes), everyone), self._skew(cohort, everyone)
        trust = balance(len(rows), float(cohort.num_examples.sum()), theirs, ours)
        share = min(1.0, need_of(accuracy, self.form) * trust * self.C * self.decay**state.round)
        facts = {"alpha": share, "accuracy": accuracy, "cohort_divergence": theirs, "server_divergence": ours}
        return share, facts

    def _skew(self, cohort: Cohort, everyone: Tensor) -> float:
        """D(P̄)."""
        if self.divergence == "cohort":
            return divergence(cohort_histogram(cohort), everyone)
        each = [divergence(u.notes["counts/labels"], everyone) for u in cohort]
        return float(torch.tensor(each, dtype=torch.float64) @ cohort.weights)

    def remark(self, asked: int, bench: Bench) -> str:
        """That all clients take part, where this makes it FedAvg."""
        return _EVERYBODY if self._is_fedavg(asked, bench) else ""

    def _is_fedavg(self, clients: int, bench: Bench) -> bool:
        return self.divergence == "cohort" and clients >= bench.population > 0


def need_of(accuracy: float, form: Need = "complement") -> float:
    """f′(acc), how much a model needs the server's rows: 1 − acc, or 1/(acc + ε).

    Example:
        >>> need_of(0.75), round(need_of(0.99, "inverse"), 6)
        (0.25, 1.0)
    """
    return 1.0 - accuracy if form == "complement" else 1.0 / (accuracy + 1e-2)


def balance(rows: float, num_examples: float, cohort: float, server: float) -> float:
    """How far the server's rows are to be trusted: n₀ D(P̄) / (n₀ D(P̄) + n′ D(P₀)).

    The server counts for more the more rows it has, the further the cohort's labels are from all clients' and the
    nearer its own are. Where neither is any way off, 0/0, only the numbers of rows speak: n₀ / (n₀ + n′).

    Args:
        rows: n₀, the server's rows.
        num_examples: n′, the cohort's.
        cohort: D(P̄), the divergence of the cohort's labels.
        server: D(P₀), that of the server's.

    Example:
        >>> balance(100, 300, 0.2, 0.2), balance(100, 300, 0.0, 0.0), balance(100, 300, 0.0, 0.1)
        (0.25, 0.25, 0.0)
    """
    ours, theirs = rows * cohort, num_examples * server
    return ours / (ours + theirs) if ours + theirs > 0 else rows / (rows + num_examples)


def interpolate(start: Params, end: Params, share: float) -> dict[str, Tensor]:
    """(1 − α) w + α w_s for every floating tensor; counters are the trained model's.

    Example:
        >>> interpolate({"w": torch.zeros(1)}, {"w": torch.ones(1)}, 0.25)
        {'w': tensor([0.2500])}
    """
    return {
        n: torch.lerp(t.double(), end[n].double(), share).to(t.dtype) if t.is_floating_point() else end[n].clone()
        for n, t in start.items()
    }


class ServerUpdate(Settings):
    """The options of FedDU's step.

    Args:
        form: f′(acc): complement is 1 − acc, inverse is 1/(acc + ε).
        C: a factor of the step.
        decay: the step fades as decay to the power of the round.
        epochs: the server's passes over its rows; by default as many as the clients'.
        batch_size: the server's; by default the clients'.
        least: a smaller α is no step at all.
        explode: a step that raises the loss on the server's rows more than so many times is taken back.
        unheard: clients that never answered are taken to have all classes alike (uniform), or are left out (ignored).
        divergence: of the "cohort"'s labels together from everybody's, the paper's, which is zero where everybody takes
            part; or the mean divergence of its "clients".
    """

    form: Need = "complement"
    C: PositiveFloat = 1.0
    decay: Annotated[float, Field(gt=0, le=1)] = 0.999
    epochs: PositiveInt | None = None
    batch_size: PositiveInt | None = None
    least: NonNegativeFloat = 1e-3
    explode: PositiveFloat = 3.0
    unheard: MissingCounts = "uniform"
    divergence: Skew = "cohort"

    def step(self) -> DynamicUpdate:
        """The step they describe."""
        return DynamicUpdate(**dict(self))


USUAL = ServerUpdate()


@method("feddu", paper="arXiv:2204.11536", family="server rows")
def feddu(update: ServerUpdate = USUAL) -> Recipe:
    """FedAvg, then some steps on the server's own rows: many while the model is poor and the cohort one-sided.

    The server trains the mean w on its rows to w_s and goes the part α = f′(acc) · n₀ D(P̄) / (n₀ D(P̄) + n′ D(P₀)) ·
    C · decayᵗ of the way. D is the Jensen–Shannon divergence of the cohort's and of the server's labels from those of
    all clients, which is why clients tell how many rows of each class they have.

    Args:
        update: how the server walks.
    """
    return Recipe(evidence=(LabelCounts(),), aggregate=Mean(), steps=(update.step(),))


@method("fedap", paper="arXiv:2204.11536", family="pruned")
def fedap(rates: Rates = RATES, ranking: FilterRanking = RANKING) -> Recipe:
    """FedAvg that removes channels once, at a rate that everybody's curvature suggests and each layer's weights adapt.

    Every client of the round, and the server, reads a rate off the spectrum of its Hessian; they are averaged by
    n_k / (D(P_k) + ε) (eq. 6). The share of a layer's weights below the global magnitude threshold is its own rate,
    and the filters with the lowest feature-map ranks on the server's rows go. From the next round on clients train
    the smaller network.

    Args:
        rates: when and how much.
        ranking: which filters stay.
    """
    step = ranking.step(rates.at - 1, rates.expected_rate(), "magnitude")
    return Recipe(evidence=rates.evidence, aggregate=Mean(), steps=(step,))


@method("fedduap", paper="arXiv:2204.11536", family="pruned")
def fedduap(update: ServerUpdate = USUAL, rates: Rates = RATES, ranking: FilterRanking = RANKING) -> Recipe:
    """FedDU in every round, and FedAP once: steps on the server's own rows, then a smaller network for everybody.

    Args:
        update: how the server walks.
        rates: when and how much is pruned.
        ranking: which filters stay.
    """
    prune = ranking.step(rates.at - 1, rates.expected_rate(), "magnitude")
    evidence = rates.evidence or (LabelCounts(),)
    return Recipe(evidence=evidence, aggregate=Mean(), steps=(update.step(), prune))
