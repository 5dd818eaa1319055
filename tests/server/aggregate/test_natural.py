import pytest
import torch
from torch import Tensor, nn

from fedfuse.client.kfac import KroneckerFactors
from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.posterior import Kron, Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, NotConverged, RecipeError
from fedfuse.linalg.factor import LowRank
from fedfuse.linalg.factor import dense as written_out
from fedfuse.linalg.kron import damp
from fedfuse.linalg.psd import unpack
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.mean import mean_of
from fedfuse.server.aggregate.natural import NaturalKron, ShareFactors
from fedfuse.training.round import client_round


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3, bias=False)
    )


SPEC = Spec.of(net())


def cohort(clients: int = 3, evidence: KroneckerFactors | None = None, seed: int = 0) -> tuple[Cohort, ServerState]:
    """Clients that trained on different rows from a common start, as the door lets them in."""
    torch.manual_seed(seed)
    evidence = evidence or KroneckerFactors(min_rows=1)
    state = ServerState(0, Single.of(SPEC.build(), SPEC))
    brief = state.brief((), 3)
    work = Work(LocalSettings(epochs=3, batch_size=5, optimizer={"lr": 0.1}), evidence=(evidence,))
    names = tuple(f"site-{k}" for k in range(clients))
    envelopes = []
    for k, name in enumerate(names):
        draw = torch.Generator().manual_seed(k)
        n = 10 + 5 * k
        rows = Rows(torch.randn(n, 2, 3, 3, generator=draw) + k, torch.randint(3, (n,), generator=draw))
        envelopes.append(Envelope(name, client_round(work, brief, name, rows).payload))
    admission = admit_all(envelopes, brief, (evidence,), names)
    assert not admission.refused
    return admission.cohort, state


def fused(aggregate: NaturalKron, who: Cohort, state: ServerState) -> dict[str, Tensor]:
    return dict(aggregate(who, state, Bench()).single.posterior.mean)


def dense(who: Cohort, layer: str, group: int, lam: float, pi: str) -> Tensor:
    """The layer's posterior mode from dense precision matrices."""
    precision, pull = 0.0, 0.0
    for share, update in zip(who.weights, who, strict=True):
        mean = update.posterior.mean
        A, B = (f[group] if f.ndim == 3 else f for f in update.posterior.geometry.factors[layer])
        A, B = damp(A.double(), B.double(), lam, pi)
        M = mean[f"{layer}.weight"].flatten(1)
        M = torch.cat([M, mean[f"{layer}.bias"][:, None]], 1) if f"{layer}.bias" in mean else M
        rows = len(B)
        P = share * torch.kron(B, A)
        precision, pull = precision + P, pull + P @ M[group * rows : (group + 1) * rows].double().flatten()
    return torch.linalg.solve(precision, pull).view(rows, -1)


@pytest.mark.parametrize("pi", ["one", "trace", "frobenius"])
def test_every_layer_and_group_equals_a_dense_solve(pi: str) -> None:
    who, state = cohort()
    found = fused(NaturalKron(1e-2, pi, tol=1e-12), who, state)
    assert torch.allclose(found["4.weight"], dense(who, "4", 0, 1e-2, pi).float(), atol=1e-5)
    conv = torch.cat([dense(who, "0", group, 1e-2, pi) for group in range(2)])
    assert torch.allclose(found["0.weight"].flatten(1), conv[:, :-1].float(), atol=1e-5)
    assert torch.allclose(found["0.bias"], conv[:, -1].float(), atol=1e-5)


@pytest.mark.parametrize("scale", ["layer", "root", "client"])
def test_factors_are_scaled_before_they_are_damped(scale: str) -> None:
    """Against the dense solve of factors scaled by hand: s^p / Σ f s^p, and λ a share of the layer's mean."""
    who, state = cohort()
    found = fused(NaturalKron(1e-2, "trace", tol=1e-12, scale=scale), who, state)["4.weight"]
    pairs = [[f.double() for f in u.posterior.geometry.factors["4"]] for u in who]
    sizes = [float(A.trace() / len(A) * B.trace() / len(B)) for A, B in pairs]
    says = [s ** {"layer": 1, "root": 0.5, "client": 0}[scale] for s in sizes]
    total = sum(f * say for f, say in zip(who.weights.tolist(), says, strict=True))
    precision, pull = 0.0, 0.0
    for f, u, (A, B), size, say in zip(who.weights, who, pairs, sizes, says, strict=True):
        A, B = damp(A, B * (say / total / size), 1e-2, "trace")
        P = f * torch.kron(B, A)
        precision, pull = precision + P, pull + P @ u.posterior.mean["4.weight"].double().flatten()
    assert torch.allclose(found, torch.linalg.solve(precision, pull).view(3, -1).float(), atol=1e-5)


def test_scaled_by_client_the_size_of_a_clients_factors_changes_nothing() -> None:
    who, state = cohort()

    def louder(u: ClientUpdate, by: float) -> ClientUpdate:
        factors = {n: (A, B * by) for n, (A, B) in u.posterior.geometry.factors.items()}
        return ClientUpdate(u.client, Posterior(u.posterior.mean, Kron(factors)), u.num_examples, u.steps, u.spec)

    shouting = Cohort.of([louder(u, 10.0**k) for k, u in enumerate(who)])
    solve = NaturalKron(1e-2, scale="client", tol=1e-10)
    before, after = fused(solve, who, state), fused(solve, shouting, state)
    assert all(torch.allclose(before[n], after[n], atol=1e-6) for n in before)
    plain = NaturalKron(1e-2, tol=1e-10)
    assert not torch.allclose(
        fused(plain, who, state)["4.weight"], fused(plain, shouting, state)["4.weight"], atol=1e-3
    )


def test_uniform_shares_do_not_look_at_examples() -> None:
    who, state = cohort()
    alike = Cohort.of([ClientUpdate(u.client, u.posterior, 7.0, u.steps, u.spec) for u in who])
    for name in ("0.weight", "4.weight"):
        uniform = fused(NaturalKron(shares="uniform"), who, state)[name]
        assert torch.allclose(uniform, fused(NaturalKron(), alike, state)[name], atol=1e-6)
        assert not torch.allclose(uniform, fused(NaturalKron(), who, state)[name], atol=1e-5)


def test_a_damping_of_the_clients_choice_belongs_to_factors_as_they_are() -> None:
    with pytest.raises(RecipeError, match="set scale to 'none', or damping to a number"):
        NaturalKron("evidence", "evidence", scale="root")


def test_factors_of_low_rank_are_fused_as_the_matrices_they_stand_for() -> None:
    who, state = cohort(evidence=KroneckerFactors(rank=3, min_rows=1))
    assert isinstance(who.updates[0].posterior.geometry.factors["4"][0], LowRank)

    def written(u: ClientUpdate) -> ClientUpdate:
        factors = {n: (written_out(A), written_out(B)) for n, (A, B) in u.posterior.geometry.factors.items()}
        return ClientUpdate(u.client, Posterior(u.posterior.mean, Kron(factors)), u.num_examples, u.steps, u.spec)

    solve = NaturalKron(1e-2, scale="root", tol=1e-11)
    low, full = fused(solve, who, state), fused(solve, Cohort.of([written(u) for u in who]), state)
    assert all(torch.allclose(low[n], full[n], atol=1e-5) for n in low)


def test_what_has_no_factors_is_averaged_and_named() -> None:
    who, state = cohort()
    after = NaturalKron()(who, state, Bench())
    plain = mean_of(who)
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert after.facts["averaged"] == names
    assert all(torch.equal(after.single.posterior.mean[n], plain[n]) for n in names)
    assert set(after.facts["iterations"]) == set(after.facts["residual"]) == {"0", "4", "1.weight", "1.bias"}
    assert max(after.facts["residual"].values()) <= 1e-8
    assert list(after.single.posterior.mean) == list(who.names)


def test_a_layer_nobody_knows_anything_about_is_averaged() -> None:
    who, state = cohort()
    blank = []
    for u in who:
        factors = dict(u.posterior.geometry.factors)
        factors["4"] = tuple(torch.zeros_like(f) for f in factors["4"])
        blank.append(
            ClientUpdate(u.client, Posterior(u.posterior.mean, Kron(factors)), u.num_examples, u.steps, u.spec)
        )
    after = NaturalKron()(Cohort.of(blank), state, Bench())
    assert "4.weight" in after.facts["averaged"]
    assert torch.equal(after.single.posterior.mean["4.weight"], mean_of(who)["4.weight"])


@pytest.mark.parametrize("solver", ["exact", "expectation"])
def test_one_client_or_clients_that_agree_come_back(solver: str) -> None:
    who, state = cohort()
    first = who.updates[0]
    twins = Cohort.of([ClientUpdate(c, first.posterior, m, 1, SPEC) for c, m in (("a", 1.0), ("b", 7.0))])
    for crowd in (Cohort((first,)), twins):
        found = fused(NaturalKron(solver=solver), crowd, state)
        assert all(torch.allclose(found[n], first.posterior.mean[n], atol=1e-6) for n in who.names)


def shared(who: Cohort, place: int) -> Cohort:
    """The cohort with everybody's A (0) or B (1) that of the first."""
    common = who.updates[0].posterior.geometry.factors
    updates = []
    for u in who:
        pairs = {n: list(u.posterior.geometry.factors[n]) for n in common}
        for n in pairs:
            pairs[n][place] = common[n][place]
        kron = Kron({n: tuple(p) for n, p in pairs.items()})
        updates.append(ClientUpdate(u.client, Posterior(u.posterior.mean, kron), u.num_examples, u.steps, u.spec))
    return Cohort.of(updates)


@pytest.mark.parametrize("place", [0, 1])
def test_the_expectation_is_exact_where_one_side_agrees_and_not_elsewhere(place: int) -> None:
    who, state = cohort()
    exact, expectation = NaturalKron(1e-2, "one", tol=1e-11), NaturalKron(1e-2, "one", "expectation")
    alike = shared(who, place)
    a, b = fused(exact, alike, state), fused(expectation, alike, state)
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in who.names)
    a, b = fused(exact, who, state), fused(expectation, who, state)
    assert not torch.allclose(a["4.weight"], b["4.weight"], atol=1e-4)


def test_gradient_steps_approach_the_exact_solution() -> None:
    who, state = cohort()
    few, many = (NaturalKron(1e-1, "one", "gradient", max_iters=n)(who, state, Bench()) for n in (10, 2000))
    assert many.facts["residual"]["4"] < few.facts["residual"]["4"] / 10
    assert many.facts["iterations"]["4"] == 2000


def test_strong_damping_is_the_plain_mean() -> None:
    who, state = cohort()
    found, plain = fused(NaturalKron(1e12, "one"), who, state), mean_of(who)
    assert all(torch.allclose(found[n].double(), plain[n].double(), atol=1e-5) for n in who.names)


def test_a_solver_that_stops_early_names_the_layer() -> None:
    who, state = cohort()
    with pytest.raises(NotConverged, match="layer 0, group 0"):
        NaturalKron(1e-9, "one", max_iters=1)(who, state, Bench())


def test_clients_may_choose_the_damping_and_its_split() -> None:
    who, state = cohort(evidence=KroneckerFactors(choose=True, min_rows=1))
    after = NaturalKron("evidence", "evidence", tol=1e-10)(who, state, Bench())
    for u in who:
        best = int(u.notes["kron/evidence"].argmax())
        assert after.facts["damping"][u.client] == float(u.notes["kron/damping"][best])
        assert after.facts["pi"][u.client] == ("one", "trace", "frobenius")[best]
    traced = NaturalKron("evidence", "trace")(who, state, Bench())
    assert traced.facts["damping"]["site-0"] == float(who.updates[0].notes["kron/damping"][1])
    with pytest.raises(RecipeError, match="set damping to 'evidence' too"):
        NaturalKron(1e-3, "evidence")


def test_the_servers_memory_keeps_the_mean_factors() -> None:
    who, state = cohort()
    after = ShareFactors()(state, who, Bench())
    plain = {f"kron/{layer}/{side}" for layer in "04" for side in ("in", "out")}
    norms = {f"kron/1.{name}/{side}" for name in ("weight", "bias") for side in ("in/diagonal", "out")}
    assert set(after.memory) == plain | norms
    A = sum(f * u.posterior.geometry.factors["4"][0].double() for f, u in zip(who.weights, who, strict=True))
    assert torch.allclose(unpack(after.memory["kron/4/in"], 16).double(), A, rtol=1e-5)


def test_without_the_evidence_it_says_what_is_missing() -> None:
    with pytest.raises(RecipeError, match="nobody sends kron"):
        Recipe(name="half", aggregate=NaturalKron())
    who, state = cohort()
    bare = Cohort.of([ClientUpdate(u.client, Posterior(u.posterior.mean), u.num_examples, 1, SPEC) for u in who])
    with pytest.raises(ConfigError, match="site-0 has no Kronecker factors for layer 0"):
        NaturalKron()(bare, state, Bench())


def test_briefs_of_plain_tensors_expect_factors_by_name() -> None:
    """A state dict without a network still says which factors are missing."""
    params = {"fc.weight": torch.zeros(2, 3), "fc.bias": torch.zeros(2)}
    assert set(KroneckerFactors(min_rows=1).expects(Brief(0, Spec.of_tensors(params), params))) == {
        "kron/fc/in",
        "kron/fc/out",
    }
