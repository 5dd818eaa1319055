"""FedLPA: its pull and its solvers against dense equations, then the method through door and runner."""

import math
from typing import Any

import pytest
import torch
from tests.server.aggregate.test_natural import cohort as cohort_of_beliefs
from torch import Tensor, nn

import fedfuse
from fedfuse.client.kfac import KroneckerFactors
from fedfuse.core.messages import Brief, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Aggregator, TaskLoss, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.engines.local import InProcess
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import Setting, prepare
from fedfuse.linalg.factor import dense
from fedfuse.linalg.kron import natural_mean
from fedfuse.linalg.psd import pack
from fedfuse.methods.fedlpa import BestStep, EarlyStopped, KeepFactors, PosteriorPull, descend, early_mean
from fedfuse.methods.regmean import RegressionMean
from fedfuse.nets.kronecker import blocks_of, read_factor
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.mean import Mean, mean_of
from fedfuse.server.aggregate.natural import NaturalKron
from fedfuse.server.loop import Record, one_round, run
from fedfuse.server.round import fuse_round
from fedfuse.testing import check_method
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode
from fedfuse.wire.messages import split


def fedlpa(**options: Any) -> Recipe:
    return find_method("fedlpa").recipe(**options)


@pytest.mark.parametrize("pi", ["one", "trace", "frobenius"])
def test_the_fused_layer_solves_the_papers_equation(pi: str) -> None:
    """Σ f_k B_k M A_k = Σ f_k B_k M_k A_k (eqs. 11 to 14) by a dense solve, factors damped as in eqs. 30 and 31."""
    lam, recipe = 1e-3, fedlpa(scale="none", damping=1e-3, pi=pi, min_rows=1, tol=1e-12)
    torch.manual_seed(0)
    module, sites = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), []
    for k, count in enumerate((20, 30, 50)):
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(k)) + k
        data = Rows(x, torch.arange(count) % 3)
        sites.append(fedfuse.local_update(module, data, recipe, client=f"s{k}", epochs=3, lr=0.1))
    fused = fedfuse.fuse(sites, recipe).state_dict()
    size = {
        "one": lambda t: 1.0,
        "trace": lambda t: t.trace() / len(t),
        "frobenius": lambda t: t.norm() / len(t) ** 0.5,
    }
    for layer in ("0", "2"):
        left = right = torch.zeros((), dtype=torch.float64)
        for f, site in zip((0.2, 0.3, 0.5), sites, strict=True):
            notes, own = split(decode(site.payload))[1], site.state_dict()
            A, B = (dense(read_factor(notes, f"kron/{layer}/{side}")).double() for side in ("in", "out"))
            ratio = (size[pi](A) / size[pi](B)) ** 0.5
            A, B = A + ratio * lam**0.5 * torch.eye(len(A)), B + lam**0.5 / ratio * torch.eye(len(B))
            M = torch.cat([own[f"{layer}.weight"], own[f"{layer}.bias"][:, None]], 1).double()
            left, right = left + f * torch.kron(B, A), right + f * (B @ M @ A)
        M = torch.linalg.solve(left, right.flatten()).view_as(right)
        found = torch.cat([fused[f"{layer}.weight"], fused[f"{layer}.bias"][:, None]], 1).double()
        torch.testing.assert_close(found, M, rtol=1e-4, atol=1e-5)


def test_server_options_leave_the_clients_work_alone() -> None:
    """Comparing solvers and dampings trains once: the memo's key is the client half."""
    options: list[dict[str, Any]] = [{}, {"scale": "none"}, {"damping": 0.1, "solver": "expectation", "pi": "one"}]
    assert len({fedlpa(**chosen).work(LocalSettings()).key for chosen in [*options, {"solver": "early"}]}) == 1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3, bias=False)).double()


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(5, 2, 3, 3, dtype=torch.float64, generator=draw), torch.randint(3, (5,), generator=draw)


def psd(groups: int, d: int, seed: int) -> Tensor:
    X = torch.randn(groups, d, d + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return X @ X.mT


def kron(seed: int) -> dict[str, Tensor]:
    """Packed factors of both layers."""
    sizes = {"0/in": (2, 5), "0/out": (2, 2), "3/in": (1, 16), "3/out": (1, 3)}
    stacks = {n: pack(psd(g, d, seed + i)) for i, (n, (g, d)) in enumerate(sizes.items())}
    return {f"kron/{n}": t if len(t) > 1 else t[0] for n, t in stacks.items()}


def at_work(theirs: dict[str, Tensor], mine: dict[str, Tensor], step: float = 0.1) -> Local:
    spec = Spec.of(net())
    module = spec.build()
    brief = Brief(1, spec, {n: t.clone() for n, t in module.state_dict().items()}, theirs, classes=3)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(step * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel())))
    return Local("site", brief, Rows(*batch()), LocalSettings(), module, mine, seed=0)


def dense_pull(local: Local, theirs: dict[str, Tensor], mine: dict[str, Tensor]) -> Tensor:
    """Per layer ½ dᵀ [(B_g − B_k) ⊗ (A_g − A_k)] d over all groups, from dense Kronecker products."""
    terms = []
    for block in blocks_of(local.brief.spec):
        away = block.matrices(local.live) - block.matrices(local.anchor)
        total = torch.zeros((), dtype=torch.float64)
        for group in range(block.groups):
            gaps = []
            for side, d in (("in", away.shape[2]), ("out", away.shape[1])):
                full = torch.zeros(d, d, dtype=torch.float64)
                name = f"kron/{block.name}/{side}"
                row, col = torch.triu_indices(d, d)
                gap = (theirs[name] - mine[name]).view(block.groups, -1)[group]
                full[row, col] = gap
                full[col, row] = gap
                gaps.append(full)
            d = away[group].flatten()
            total = total + 0.5 * d @ torch.kron(gaps[1], gaps[0]) @ d
        terms.append(total)
    return torch.stack(terms)


def test_the_first_round_is_the_base_loss_to_the_last_bit() -> None:
    plain, mine = TaskLoss(), kron(0)
    for theirs, own in (({}, {}), (kron(9), {}), ({}, mine)):
        local = at_work(theirs, own)
        assert torch.equal(PosteriorPull(1.0)(local, batch()), plain(local, batch()))
    local = at_work(kron(9), mine)
    assert torch.equal(PosteriorPull(0.0)(local, batch()), plain(local, batch()))


def test_the_pull_is_the_quadratic_form_of_the_differences_where_that_is_positive() -> None:
    theirs, mine = kron(20), kron(0)
    local = at_work(theirs, mine)
    terms = dense_pull(local, theirs, mine)
    assert (terms > 0).any()
    expected = TaskLoss()(local, batch()) + 0.7 * terms.clamp(min=0).sum()
    assert torch.allclose(PosteriorPull(0.7)(local, batch()), expected, rtol=1e-10)


def test_a_layer_with_a_negative_form_is_left_alone() -> None:
    mine = kron(0)
    lean = {n: t / 2 if n.endswith("in") else t * 2 for n, t in mine.items()}  # A − A_k < 0 < B − B_k
    local = at_work(lean, mine)
    assert bool((dense_pull(local, lean, mine) < 0).all())
    assert torch.equal(PosteriorPull(1.0)(local, batch()), TaskLoss()(local, batch()))


def test_the_pull_leads_back_to_the_start() -> None:
    mine = kron(0)
    theirs = {n: 2 * t for n, t in mine.items()}  # B − B_k and A − A_k are positive definite
    local = at_work(theirs, mine)
    loss = PosteriorPull(1.0)(local, batch()) - TaskLoss()(local, batch())
    grads = torch.autograd.grad(loss, list(local.live.values()))
    pairs = zip(local.live.values(), local.anchor.values(), grads, strict=True)
    assert float(sum(((w.detach() - w0) * g).sum() for w, w0, g in pairs)) > 0


EQUATION = NaturalKron(1e-1, "trace", scale="root", tol=1e-12)


def solved(state: ServerState) -> dict[str, Tensor]:
    return dict(state.single.posterior.mean)


def server_rows(n: int = 40) -> Bench:
    draw = torch.Generator().manual_seed(9)
    return Bench(Rows(torch.randn(n, 2, 3, 3, generator=draw) + 1, torch.randint(3, (n,), generator=draw)), classes=3)


def belief(who: Cohort) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    pairs = [[dense(f).double() for f in u.posterior.geometry.factors["4"]] for u in who]
    eye = torch.eye
    return (
        [u.posterior.mean["4.weight"] for u in who],
        [A + 0.1 * eye(len(A)) for A, _ in pairs],
        [B + 0.1 * eye(len(B)) for _, B in pairs],
        who.weights,
    )


def test_enough_iterations_are_the_exact_solve_from_any_start() -> None:
    who, state = cohort_of_beliefs()
    system = belief(who)
    exact = natural_mean(*system, tol=1e-12).x
    for start in (torch.zeros(3, 16), torch.ones(3, 16)):
        found = early_mean(*system, start=start, iterations=500, what="a layer")
        assert torch.allclose(found.x, exact, atol=1e-8)
    for begin in ("mean", "regmean", "tasks"):
        fused = EarlyStopped(EQUATION, begin, 500)(who, state, Bench())
        assert torch.allclose(solved(fused)["4.weight"], solved(EQUATION(who, state, Bench()))["4.weight"], atol=1e-5)


def test_iterations_are_those_of_conjugate_gradients() -> None:
    """One step of steepest descent, by hand, on the equation written out as a dense system."""
    who, _ = cohort_of_beliefs()
    Ms, As, Bs, shares = belief(who)
    H = sum(f * torch.kron(B, A) for f, A, B in zip(shares, As, Bs, strict=True))
    b = sum(f * (B @ M.double() @ A).flatten() for f, M, A, B in zip(shares, Ms, As, Bs, strict=True))
    x = torch.zeros(48, dtype=torch.float64)
    r = b - H @ x
    stepped = x + (r @ r) / (r @ H @ r) * r
    found = early_mean(Ms, As, Bs, shares, start=x.view(3, 16), iterations=1, what="a layer")
    assert torch.allclose(found.x.flatten(), stepped)
    assert found.iterations == 1


def test_no_iteration_is_where_it_began() -> None:
    who, state = cohort_of_beliefs()
    base = solved(state)["4.weight"].double()
    tasks = base + 0.3 * sum(u.posterior.mean["4.weight"].double() - base for u in who)
    begun = {b: solved(EarlyStopped(EQUATION, b, 0)(who, state, Bench()))["4.weight"] for b in ("mean", "tasks")}
    assert torch.allclose(begun["mean"], mean_of(who)["4.weight"], atol=1e-6)
    assert torch.allclose(begun["tasks"], tasks.float(), atol=1e-6)


def test_the_start_regmean_is_regmean() -> None:
    """Without damping, so that both read the same input factors."""
    who, state = cohort_of_beliefs()
    begun = EarlyStopped(NaturalKron(1e-14, "one"), "regmean", 0)(who, state, Bench())
    assert torch.allclose(
        solved(begun)["4.weight"], solved(RegressionMean(1.0)(who, state, Bench()))["4.weight"], atol=1e-3
    )


def test_adam_descends_to_the_natural_mean() -> None:
    system = belief(cohort_of_beliefs()[0])
    exact = natural_mean(*system, tol=1e-12).x
    walk = descend(*system, start=torch.zeros(3, 16), rate=0.01, every=200)
    assert float((next(walk) - exact).norm()) < 1e-2 * float(exact.norm())


def test_the_best_step_is_kept() -> None:
    who, state = cohort_of_beliefs()
    bench = server_rows()
    fused = BestStep(EQUATION, steps=60, every=20)(who, state, bench)
    losses = fused.facts["server_losses"]
    assert len(losses) == 4
    assert fused.facts["step"] == 20 * losses.index(min(losses))
    logits = fused.single.logits(bench.rows.x)
    assert math.isclose(float(bench.task.loss(logits, bench.rows.y)), min(losses), rel_tol=1e-5)
    assert losses[0] == pytest.approx(
        float(bench.task.loss(state.fused(mean_of(who)).single.logits(bench.rows.x), bench.rows.y)), rel=1e-4
    )


def test_a_start_that_does_not_matter_is_refused() -> None:
    with pytest.raises(RecipeError, match="begin is 'tasks'"):
        fedlpa(begin="tasks")


def test_stopping_early_keeps_the_laws() -> None:
    assert "order" in check_method("fedlpa", solver="early", max_iters=3, begin="regmean")


def experiment(*methods: dict[str, Any], rounds: int = 1, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": rounds,
        "data": {"clients": 4, "partition": {"kind": "classes", "per_client": 3}, "train_limit": 400},
        "model": {"name": "mlp", "hidden": [12]},
        "local": {"epochs": 3, "batch_size": 16, "optimizer": {"lr": 0.1, "momentum": 0.9}},
        "judge": {"clients": "never"},
    }
    return Experiment(**(settings | {"methods": methods} | changes))


def records(setting: Setting, recipe: Recipe) -> list[Record]:
    engine = InProcess(setting.population, setting.seed)
    return list(run(recipe, engine, setting.bench, setting.judge, setting.start, setting.plan))


def weights(record: Record) -> dict[str, torch.Tensor]:
    return dict(record.state.single.posterior.mean)


@pytest.mark.parametrize("options", [{"damping": 0}, {"damping": "much"}, {"pi": "two"}, {"solver": "cg"}, {"eta": -1}])
def test_impossible_options_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"option {next(iter(options))}"):
        fedlpa(**options)


def test_half_precision_is_of_eigenvectors() -> None:
    with pytest.raises(RecipeError, match="half stores eigenvectors in half precision and there are none; set rank"):
        fedlpa(half=True)


class Reader(nn.Module):
    """Reads five tokens and tells the class: embedding, attention, norms, a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.classes = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.encoder(self.words(x)).mean(1))


@pytest.mark.parametrize("options", [{}, {"rank": 2, "half": True}, {"sharing": "reduce"}, {"centred": True}])
def test_a_transformer_is_not_averaged_in_disguise(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    spec, recipe = Spec.of(Reader()), fedlpa(min_rows=1, **options)
    state = ServerState(0, Single.of(spec.build(), spec))
    brief, replies = state.brief((), 3), []
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        tokens = torch.randint(12, (40, 5), generator=draw) // (k + 1)
        rows = Rows(tokens, torch.randint(k, 3, (40,), generator=draw))
        work = recipe.work(LocalSettings(epochs=4, batch_size=8, optimizer={"lr": 0.1}))
        replies.append(Envelope(f"site-{k}", client_round(work, brief, f"site-{k}", rows).payload))
    admission = admit_all(replies, brief, recipe.evidence, [f"site-{k}" for k in range(3)])
    assert not admission.refused
    after = fuse_round(recipe, admission.cohort, state, Bench())
    assert after.facts["averaged"] == []
    assert max(after.facts["residual"].values()) <= 1e-8
    plain = mean_of(admission.cohort)
    fused = after.single.posterior.mean
    assert all(not torch.allclose(fused[n], plain[n], atol=1e-4) for n in fused if n != "words.weight")
    seen = fused["words.weight"] - plain["words.weight"]
    assert torch.allclose(seen[0], torch.zeros(8), atol=1e-6)  # nobody learns anything of the token that pads
    assert bool((seen[1:].abs().amax(1) > 1e-5).all())


class Listener(nn.Module):
    """Layers that have no factors: attention to other widths, a norm by root mean squares, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.attend = nn.MultiheadAttention(6, 2, kdim=4, vdim=4, batch_first=True)
        self.norm, self.recur = nn.RMSNorm(6), nn.LSTM(6, 5, batch_first=True)
        self.classes = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attend(self.first(x), x, x, need_weights=False)
        return self.classes(self.recur(self.norm(seen))[0][:, -1])


def test_what_has_no_factors_is_averaged_and_named() -> None:
    torch.manual_seed(0)
    net, sites = Listener(), []
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        rows = Rows(torch.randn(30, 5, 4, generator=draw), torch.randint(3, (30,), generator=draw))
        sites.append(fedfuse.local_update(net, rows, fedlpa(min_rows=1), client=f"s{k}", epochs=2, lr=0.1))
    fused, plain = (fedfuse.fuse(sites, recipe) for recipe in (fedlpa(min_rows=1), "fedavg"))
    named = {name.partition(".")[0] for name in fused.facts["averaged"]}
    assert named == {"attend", "norm", "recur"}
    assert not {n for n in fused.facts["averaged"] if n.startswith(("first", "classes"))}
    means, found = plain.state_dict(), fused.state_dict()
    assert all(torch.allclose(found[n], means[n]) for n in fused.facts["averaged"])
    assert not torch.allclose(found["first.weight"], means["first.weight"], atol=1e-4)


def test_a_split_by_evidence_needs_a_damping_by_evidence() -> None:
    with pytest.raises(RecipeError, match="set damping to 'evidence' too"):
        fedlpa(pi="evidence")


def test_in_one_exchange_it_is_far_above_the_plain_mean_on_skewed_digits() -> None:
    prepared = prepare(
        experiment(
            {"name": "fedlpa"},
            data={"clients": 5, "partition": {"kind": "dirichlet", "alpha": 0.1}},
            model={"name": "mlp", "hidden": [32]},
            local={"epochs": 3, "batch_size": 16, "optimizer": {"lr": 0.05, "momentum": 0.9}},
        )
    )
    setting, recipe = prepared.setting(0), fedlpa(damping="evidence")
    brief, engine = setting.start.brief((), 10), InProcess(setting.population, 0)
    replies = engine.exchange(brief, recipe.work(prepared.local), engine.clients)
    cohort = admit_all(replies, brief, recipe.evidence, engine.clients).cohort

    def accuracy(aggregate: Aggregator) -> float:
        return float(setting.judge.evaluate(aggregate(cohort, setting.start, setting.bench).model)["accuracy"])

    mean = accuracy(Mean())
    assert accuracy(fedlpa().aggregate) > mean + 0.3
    assert accuracy(recipe.aggregate) > mean + 0.3


def test_the_pull_changes_nothing_in_the_first_round_and_something_in_the_second() -> None:
    local = {"epochs": 3, "batch_size": 16, "optimizer": {"lr": 0.1, "momentum": 0.9}, "kernel": "torch"}
    setting = prepare(experiment({"name": "fedlpa"}, rounds=2, local=local)).setting(0)
    plain, pulled = records(setting, fedlpa()), records(setting, fedlpa(eta=1.0))
    assert all(torch.equal(weights(plain[0])[n], t) for n, t in weights(pulled[0]).items())
    assert not torch.equal(weights(plain[1])["fc1.weight"], weights(pulled[1])["fc1.weight"])
    assert plain[1].state.memory == {}
    assert set(pulled[1].state.memory) == {f"kron/{n}/{s}" for n in ("fc1", "classifier") for s in ("in", "out")}
    assert pulled[1].facts["bytes_down"] > pulled[0].facts["bytes_down"]


def test_it_can_hand_over_to_fedavg_after_the_first_exchange() -> None:
    """What the paper recommends for several rounds: FedLPA once, FedAvg after."""
    both = {"name": "fedlpa", "rounds": 1, "then": {"name": "fedavg"}}
    prepared = prepare(experiment(both, rounds=3))
    assert list(prepared.recipes) == ["fedlpa→fedavg"]
    setting = prepared.setting(0)
    first, second, third = records(setting, prepared.recipes["fedlpa→fedavg"])
    alone = records(setting, fedlpa())[0]
    assert all(torch.equal(weights(first)[n], t) for n, t in weights(alone).items())
    assert "residual" in first.facts["facts"]
    assert second.facts["facts"] == {}
    assert second.facts["reveals"] == []
    average = find_method("fedavg").recipe()
    engine = InProcess(setting.population, setting.seed)
    expected = one_round(average, engine, setting.bench, None, first.state, setting.plan)
    assert all(torch.equal(weights(second)[n], t) for n, t in weights(expected).items())
    assert third.state.round == 3


def test_factors_are_kept_as_they_were_sent_and_only_when_asked() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    brief, rows = (
        Brief(0, Spec.of(module), module.state_dict(), classes=2),
        Rows(torch.randn(12, 3), torch.arange(12) % 2),
    )
    evidence = (KroneckerFactors(choose=True, min_rows=1),)
    sent = client_round(Work(evidence=evidence), brief, "a", rows)
    kept = client_round(Work(evidence=evidence, memory=(KeepFactors(),)), brief, "a", rows)
    assert sent.memory == {}
    assert set(kept.memory) == {f"kron/{layer}/{side}" for layer in "02" for side in ("in", "out")}
    assert all(decode(kept.payload).tensors[f"~{n}"].equal(t) for n, t in kept.memory.items())
