"""RegMean: the regression equation on known inputs, and what stands beside it."""

import pytest
import torch
from torch import Tensor, nn

from fedfuse.client.kfac import KroneckerFactors
from fedfuse.client.layer_inputs import InputFactors, input_factors
from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Evidence, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import RecipeError
from fedfuse.linalg.factor import dense
from fedfuse.linalg.kron import natural_mean
from fedfuse.linalg.ridge import regression_mean, shrink_moments
from fedfuse.methods.regmean import RegressionMean
from fedfuse.nets.channels import channel_groups, move_posterior_units
from fedfuse.nets.kronecker import mixing_blocks
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.mean import mean_of
from fedfuse.training.round import client_round


class Words(nn.Module):
    """An embedding, an attention and a linear layer: every kind that reads sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        answer: Tensor = self.head(self.norm(h + self.attend(h, h, h, need_weights=False)[0]).mean(1))
        return answer


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3, bias=False)
    )


NETWORKS = {"pictures": (pictures, (2, 3, 3)), "words": (Words, (5,))}


def some_rows(network: str, seed: int, n: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    shape = NETWORKS[network][1]
    if network == "words":
        return Rows(torch.randint(7, (n, *shape), generator=draw), torch.randint(3, (n,), generator=draw))
    return Rows(torch.randn(n, *shape, generator=draw) + seed, torch.randint(3, (n,), generator=draw))


def cohort(network: str, evidence: Evidence | None = None) -> tuple[Cohort, ServerState]:
    """Clients that trained on different rows from a common start, as the door lets them in."""
    torch.manual_seed(0)
    evidence = evidence or InputFactors(min_rows=1)
    spec = Spec.of(NETWORKS[network][0]())
    state = ServerState(0, Single.of(spec.build(), spec))
    brief = state.brief((), 3)
    work = Work(LocalSettings(epochs=3, batch_size=5, optimizer={"lr": 0.1}), evidence=(evidence,))
    names = tuple(f"site-{k}" for k in range(3))
    envelopes = [
        Envelope(name, client_round(work, brief, name, some_rows(network, k, 10 + 5 * k)).payload)
        for k, name in enumerate(names)
    ]
    admission = admit_all(envelopes, brief, (evidence,), names)
    assert not admission.refused
    return admission.cohort, state


def solved_densely(who: Cohort, layer: str, M: list[Tensor], group: int, alpha: float) -> Tensor:
    """The layer by the normal equations, written out as one dense system over all its numbers."""
    left, right = 0.0, 0.0
    for share, update, own in zip(who.weights, who, M, strict=True):
        A = dense(update.posterior.geometry.factors[layer][0]).double()
        A = A[group] if A.ndim == 3 else A
        A = alpha * A + (1 - alpha) * A.diagonal().diag()
        P = share * torch.kron(torch.eye(len(own), dtype=torch.float64), A)
        left, right = left + P, right + P @ own.double().flatten()
    return (torch.linalg.pinv(left, hermitian=True) @ right).view_as(M[0])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_linear_and_grouped_convolution_equal_a_dense_solve(alpha: float) -> None:
    who, state = cohort("pictures")
    fused = RegressionMean(alpha)(who, state, Bench())
    found = fused.single.posterior.mean
    heads = [u.posterior.mean["4.weight"] for u in who]
    assert torch.allclose(found["4.weight"], solved_densely(who, "4", heads, 0, alpha).float(), atol=1e-5)
    for group in range(2):
        mine = slice(2 * group, 2 * group + 2)
        conv = [
            torch.cat([u.posterior.mean["0.weight"].flatten(1), u.posterior.mean["0.bias"][:, None]], 1)[mine]
            for u in who
        ]
        wanted = solved_densely(who, "0", conv, group, alpha).float()
        assert torch.allclose(found["0.weight"].flatten(1)[mine], wanted[:, :-1], atol=1e-5)
        assert torch.allclose(found["0.bias"][mine], wanted[:, -1], atol=1e-5)
    assert set(fused.facts["averaged"]) == {n for n in found if n.startswith("1.")}


def test_attention_and_embedding_equal_a_dense_solve() -> None:
    who, state = cohort("words")
    fused = RegressionMean(0.9)(who, state, Bench())
    found = fused.single.posterior.mean
    for group, name in enumerate(("queries", "keys", "values")):
        mine = slice(4 * group, 4 * group + 4)
        own = [
            torch.cat([u.posterior.mean["attend.in_proj_weight"], u.posterior.mean["attend.in_proj_bias"][:, None]], 1)
            for u in who
        ]
        wanted = solved_densely(who, "attend.in_proj_weight", [m[mine] for m in own], group, 0.9).float()
        assert torch.allclose(found["attend.in_proj_weight"][mine], wanted[:, :-1], atol=1e-5), name
    counts = [dense(u.posterior.geometry.factors["embed.weight"][0]).diagonal(dim1=-2, dim2=-1).double() for u in who]
    weights = [u.posterior.mean["embed.weight"].double() for u in who]
    says = [f * c[:, None] for f, c in zip(who.weights, counts, strict=True)]
    by_count = sum(s * w for s, w in zip(says, weights, strict=True)) / sum(says)
    assert torch.allclose(found["embed.weight"][1:], by_count[1:].float(), atol=1e-6)  # 0 pads, and nobody reads it
    assert torch.allclose(found["embed.weight"][0], mean_of(who)["embed.weight"][0])
    assert fused.facts["averaged"] == ["norm.weight", "norm.bias"]


def test_regression_is_the_best_fit_of_all_answers() -> None:
    """Without shrinking, M minimizes Σ ‖(M − M_k) X_k‖² over everybody's own rows: least squares, stacked."""
    draw = torch.Generator().manual_seed(0)
    X = [torch.randn(4, 20, generator=draw, dtype=torch.float64) for _ in range(3)]
    M = [torch.randn(2, 4, generator=draw, dtype=torch.float64) for _ in range(3)]
    found = regression_mean(M, [x @ x.mT for x in X], [1 / 3] * 3)
    answers = torch.cat([m @ x for m, x in zip(M, X, strict=True)], 1)
    wanted = torch.linalg.lstsq(torch.cat(X, 1).mT, answers.mT).solution.mT
    assert torch.allclose(found, wanted, atol=1e-12)


def test_inputs_nobody_has_seen_keep_the_mean_and_scales_do_not_matter() -> None:
    M = [torch.zeros(1, 3), torch.full((1, 3), 4.0)]
    A = torch.diag(torch.tensor([1e-12, 1e6, 0.0], dtype=torch.float64))
    assert regression_mean(M, [A, 3 * A], [0.5, 0.5]).tolist() == [[3.0, 3.0, 2.0]]


def test_evidence_is_half_of_the_factors_and_needs_no_labels() -> None:
    who, _ = cohort("pictures")
    both, _ = cohort("pictures", KroneckerFactors(min_rows=1))
    update, other = who.updates[1], both.updates[1]
    assert all(f[1].is_diagonal and bool((f[1].rest == 1).all()) for f in update.posterior.geometry.factors.values())
    A = update.posterior.geometry.factors["4"][0]
    assert torch.allclose(A, other.posterior.geometry.factors["4"][0], rtol=1e-5)  # one position: the same moments
    assert sum(t.numel() for t in update.notes.values()) < sum(t.numel() for t in other.notes.values())
    module = update.spec.build()
    module.load_state_dict(dict(update.posterior.mean))
    inputs = some_rows("pictures", 1, 15).x
    again = input_factors(module.eval(), mixing_blocks(update.spec), inputs, batch=4)
    assert torch.allclose(again["4"][0].float(), A, rtol=1e-5)


def test_factors_sent_for_fedlpa_will_do() -> None:
    """Positions aside, the same A: a linear layer is fused to the same weights."""
    who, state = cohort("pictures")
    both, _ = cohort("pictures", KroneckerFactors(min_rows=1))
    mine, theirs = (RegressionMean()(c, state, Bench()).single.posterior.mean for c in (who, both))
    assert torch.allclose(mine["4.weight"], theirs["4.weight"], atol=1e-5)
    assert torch.allclose(mine["0.weight"], theirs["0.weight"], atol=1e-5)


def test_it_is_the_natural_mean_with_the_identity_for_outputs() -> None:
    """FedLPA's exact solver finds the same layer from the same moments and B = I."""
    who, state = cohort("pictures")
    M = [u.posterior.mean["4.weight"].double() for u in who]
    A = [shrink_moments(u.posterior.geometry.factors["4"][0], 0.9) for u in who]
    exact = natural_mean(M, A, [torch.eye(3)] * 3, who.weights, tol=1e-12).x
    assert torch.allclose(RegressionMean(0.9)(who, state, Bench()).single.posterior.mean["4.weight"], exact.float())


def test_moved_units_take_their_moments_along() -> None:
    """A client whose hidden units stand elsewhere, moved back, fuses as if it had never moved."""
    spec = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})
    update = ClientUpdate("a", Posterior(dict(spec.build().state_dict())), 10.0, 1, spec)
    brief = Brief(0, spec, update.posterior.mean, classes=2)
    evidence = InputFactors(min_rows=1)
    rows = Rows(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(12, dtype=torch.int64))
    payload = client_round(Work(LocalSettings(epochs=1), evidence=(evidence,)), brief, "a", rows).payload
    moved = admit_all([Envelope("a", payload)], brief, (evidence,), ("a",)).cohort.updates[0]
    group = next(iter(channel_groups(spec, (3,))))
    order = torch.tensor([2, 0, 3, 1])
    A = moved.posterior.geometry.factors["classifier"][0]
    index = torch.cat([order, torch.tensor([4])])
    after = move_posterior_units(moved.posterior, {group: order}, spec.layout).geometry.factors["classifier"][0]
    assert torch.equal(dense(after), A[index][:, index])


def test_a_client_with_few_rows_tells_sizes_alone(caplog: pytest.LogCaptureFixture) -> None:
    who, _ = cohort("pictures", InputFactors(min_rows=12))
    A = who.updates[0].posterior.geometry.factors["4"][0]
    assert torch.equal(A, torch.eye(16) * A[0, 0])
    assert "site-0 has 10 rows" in caplog.text


def test_the_door_refuses_outputs_that_are_no_identity() -> None:
    who, _ = cohort("pictures")
    notes = dict(who.updates[0].notes)
    notes["kron/4/out/diagonal"] = notes["kron/4/out/diagonal"] * 2
    flaw = InputFactors().check(notes, 10.0)
    assert flaw is not None
    assert (flaw.field, flaw.expected) == ("kron/4/out/diagonal", "ones")


def test_alpha_must_be_a_share() -> None:
    with pytest.raises(RecipeError, match="alpha is 2"):
        RegressionMean(2.0)


def test_fisher_is_the_diagonal_rule_of_laplace() -> None:
    mine = find_method("fisher").recipe(floor=1e-3, labels="empirical", shares="examples")
    theirs = find_method("laplace").recipe()
    assert (mine.evidence, mine.aggregate) == (theirs.evidence, theirs.aggregate)
    assert find_method("fisher").recipe().aggregate.uniform
