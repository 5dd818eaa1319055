"""Kronecker factors against dense per-example gradients, their sharing and packing, and the damping rows prefer."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.client.kfac import KroneckerFactors, LayerBelief, best_damping, kronecker_factors
from fedfuse.core.messages import Brief, Envelope, Form
from fedfuse.core.posterior import Kron
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.linalg.factor import LowRank, dense
from fedfuse.linalg.kron import damp
from fedfuse.linalg.psd import is_psd, unpack
from fedfuse.nets.kronecker import blocks_of
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode
from fedfuse.wire.messages import split


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, (2, 3), padding=(0, 1), groups=2, bias=False),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Conv2d(6, 3, 2, dilation=2),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def linear_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 7 * 8, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def examples(n: int = 9) -> Rows:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(n, 2, 7, 8, dtype=torch.float64, generator=draw)
    return Rows(x, torch.randint(3, (n,), generator=draw))


def ready(make: Callable[[], nn.Module]) -> tuple[nn.Module, Spec]:
    torch.manual_seed(0)
    module = make().double().eval()
    return module, Spec.of(module)


class Seen:
    """What one layer read and got back for one row."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        part.register_forward_hook(self.note)

    def note(self, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.x, self.out = args[0].detach(), output
        self.out.retain_grad()
        return output.clone()  # so that an in-place activation after it cannot touch what we keep


def by_brute_force(module: nn.Module, path: str, rows: Rows) -> tuple[Tensor, Tensor]:
    """A and B row by row and position by position, from their definition."""
    part = module.get_submodule(path)
    seen, groups = Seen(part), getattr(part, "groups", 1)
    A, B = 0.0, 0.0
    for x, y in zip(rows.x, rows.y, strict=True):
        F.cross_entropy(module(x[None]), y[None]).backward()
        g = seen.out.grad
        if isinstance(part, nn.Conv2d):
            a = F.unfold(seen.x, part.kernel_size, part.dilation, part.padding, part.stride)[0]
            a, g = a.view(groups, -1, a.shape[-1]), g[0].view(groups, part.out_channels // groups, -1)
        else:
            a, g = seen.x[0].view(1, -1, 1), g[0].view(1, -1, 1)
        if part.bias is not None:
            a = torch.cat([a, torch.ones(groups, 1, a.shape[-1], dtype=a.dtype)], 1)
        S = a.shape[-1]
        A = A + sum(a[:, :, [s]] @ a[:, :, [s]].mT for s in range(S)) / S**2
        B = B + sum(g[:, :, [s]] @ g[:, :, [s]].mT for s in range(S)) * S
    return A / len(rows), B / len(rows)


@pytest.mark.parametrize(("make", "path"), [(conv_net, p) for p in "0257"] + [(linear_net, p) for p in "13"])
def test_factors_equal_a_brute_force_computation(make: Callable[[], nn.Module], path: str) -> None:
    module, spec = ready(make)
    rows = examples()
    found = kronecker_factors(module, blocks_of(spec), rows, batch=4)
    A, B = by_brute_force(module, path, rows)
    assert torch.allclose(found[path][0], A, rtol=1e-10, atol=1e-14)
    assert torch.allclose(found[path][1], B, rtol=1e-10, atol=1e-14)


def test_one_row_gives_the_exact_outer_product_fisher_of_a_linear_layer() -> None:
    module, spec = ready(linear_net)
    rows = examples(1)
    F.cross_entropy(module(rows.x), rows.y).backward()
    gradient = torch.cat([module[1].weight.grad, module[1].bias.grad[:, None]], 1).flatten()
    A, B = kronecker_factors(module, blocks_of(spec), rows)["1"]
    assert torch.allclose(torch.kron(B[0], A[0]), torch.outer(gradient, gradient), rtol=1e-10, atol=1e-15)


def test_the_product_is_the_usual_estimate_for_convolutions() -> None:
    """Ω ⊗ Γ of Grosse and Martens: patches summed over positions, gradients averaged over them."""
    module, spec = ready(conv_net)
    rows = examples()
    A, B = kronecker_factors(module, blocks_of(spec), rows)["0"]
    S = 4 * 4
    assert torch.allclose(A[0, -1, -1], torch.tensor(1 / S, dtype=torch.float64))
    usual_A, usual_B = A * S**2, B / S**2
    assert torch.allclose(torch.kron(usual_B[0], usual_A[0]), torch.kron(B[0], A[0]))
    assert torch.allclose(usual_A[0, -1, -1], torch.tensor(float(S), dtype=torch.float64))


def test_rows_per_pass_do_not_matter_and_nothing_is_left_behind() -> None:
    module, spec = ready(conv_net)
    rows, blocks = examples(), blocks_of(spec)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    one, all_ = kronecker_factors(module, blocks, rows, batch=1), kronecker_factors(module, blocks, rows, batch=100)
    for layer in one:
        pairs = zip(one[layer], all_[layer], strict=True)
        assert all(torch.allclose(dense(a), dense(b), rtol=1e-10, atol=1e-14) for a, b in pairs)
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_hooks for m in module.modules())


def test_hooks_go_even_when_the_network_fails() -> None:
    module, spec = ready(conv_net)
    with pytest.raises(RuntimeError):
        kronecker_factors(module, blocks_of(spec), Rows(torch.zeros(1, 9, 7, 8), torch.zeros(1, dtype=torch.int64)))
    assert not any(m._forward_hooks for m in module.modules())


class Twice(nn.Module):
    """A layer used twice, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.body, self.idle = nn.Flatten(), nn.Linear(112, 112), nn.Linear(2, 2)
        self.head = nn.Linear(112, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(torch.tanh(self.body(input=self.flat(x)))))


def test_every_use_of_a_layer_counts_as_positions_and_an_idle_one_has_no_information() -> None:
    module, spec = ready(Twice)
    found = kronecker_factors(module, blocks_of(spec), examples())
    assert torch.allclose(found["body"][0][0, -1, -1], torch.tensor(0.5, dtype=torch.float64))  # 2 uses / 2²
    assert torch.count_nonzero(found["idle"][0]) == torch.count_nonzero(found["idle"][1]) == 0
    assert found["idle"][0].shape == (1, 3, 3)
    assert is_psd(found["body"][1][0])


def test_sampled_labels_give_the_fisher_information_proper() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3).double()
    x = torch.randn(1, 4, dtype=torch.float64)
    rows = Rows(x.repeat(20_000, 1), torch.zeros(20_000, dtype=torch.int64))
    draw = torch.Generator().manual_seed(1)
    blocks = blocks_of(Spec.of(module))
    _, B = kronecker_factors(module, blocks, rows, fisher="sampled", batch=20_000, generator=draw)["weight"]
    p = module(x).softmax(-1)[0].detach()
    assert torch.allclose(B[0], p.diag() - torch.outer(p, p), atol=0.01)


class Mixed(nn.Module):
    """Layers with factors and layers without: tied weights, a frozen one, a token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight
        self.norm, self.middle = nn.LayerNorm(4), nn.Linear(4, 4)
        self.up, self.still = nn.ConvTranspose1d(4, 4, 1), nn.Linear(4, 4).requires_grad_(False)
        self.token = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.still(self.middle(self.norm(self.words(x) + self.token))))


def test_layers_with_weights_of_their_own_have_factors() -> None:
    assert [b.name for b in blocks_of(Spec.of(Mixed()))] == ["middle", "up.weight", "norm.weight", "norm.bias"]
    assert [b.name for b in blocks_of(Spec.of(Mixed()), "plain")] == ["middle"]
    groups = {b.name: b.groups for b in blocks_of(Spec.of(conv_net()))}
    assert groups == {"0": 1, "2": 2, "5": 1, "7": 1, "3.weight": 1, "3.bias": 1}


def test_a_norms_factor_is_the_diagonal_of_its_fisher_information() -> None:
    module, spec = ready(conv_net)
    rows = examples()
    A, B = kronecker_factors(module, blocks_of(spec), rows, batch=4)["3.weight"]
    squares = torch.zeros(6, dtype=torch.float64)
    for x, y in zip(rows.x, rows.y, strict=True):
        (slope,) = torch.autograd.grad(F.cross_entropy(module(x[None]), y[None]), module[3].weight)
        squares += slope.square() / len(rows)
    assert torch.allclose(A.rest[0], squares, rtol=1e-9)
    assert A.is_diagonal
    assert B.tolist() == [[[1.0]]]


def test_centred_factors_are_covariances_and_hold_no_mean() -> None:
    module, spec = ready(conv_net)
    blocks, rows = blocks_of(spec), examples()
    plain, centred = (kronecker_factors(module, blocks, rows, batch=4, centred=c) for c in (False, True))
    A, C = plain["0"][0][0], centred["0"][0][0]
    mean = A[:-1, -1] / A[-1, -1]
    assert torch.allclose(C[:-1, :-1], A[:-1, :-1] - A[-1, -1] * torch.outer(mean, mean), atol=1e-12)
    assert not bool(C[:-1, -1].any())
    assert torch.allclose(C[-1, -1], A[-1, -1])
    seen = Seen(module[2])  # without a bias, in two groups
    module(rows.x)
    patches = F.unfold(seen.x, (2, 3), 1, (0, 1), 1).double()
    patches = patches.view(len(rows), 2, -1, patches.shape[-1]).transpose(0, 1)
    flat = patches.permute(0, 2, 1, 3).flatten(2)
    flat = flat - flat.mean(-1, keepdim=True)
    S = patches.shape[-1]
    assert torch.allclose(centred["2"][0], flat @ flat.mT / (len(rows) * S**2), atol=1e-12)


def test_a_client_of_few_rows_tells_no_directions(caplog: pytest.LogCaptureFixture) -> None:
    spec, rows = Spec.of(conv_net()), narrow(examples())
    full, even = (
        split(decode(brought(KroneckerFactors(min_rows=n), spec, rows)[0]))[1] for n in (len(rows), len(rows) + 1)
    )
    assert "site has 9 rows, and factors of fewer than 10 would tell of single ones" in caplog.text
    assert len(caplog.records) == 1
    A, E = unpack(full["kron/5/in"], 25), unpack(even["kron/5/in"], 25)
    assert torch.allclose(E, torch.eye(25) * A.trace() / 25, rtol=1e-5)
    assert even["kron/3.weight/in/diagonal"].unique().numel() == 1
    silent = brought(KroneckerFactors(), spec, rows)  # twice the batch of four is eight, and there are nine
    assert torch.equal(split(decode(silent[0]))[1]["kron/5/in"], full["kron/5/in"])


def test_what_factors_reveal_is_said_as_it_is() -> None:
    assert "the mean input of every layer with a bias" in KroneckerFactors().reveals
    assert "mean input" not in KroneckerFactors(centred=True).reveals
    assert "which classes" in KroneckerFactors().reveals


class Pooled(nn.Module):
    """A layer over positions that are averaged before the classes are told."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return self.last(out.flatten(2).mean(-1) if out.ndim > 3 or isinstance(self.layer, nn.Conv1d) else out.mean(1))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_reduce_is_exact_for_one_row_whose_positions_are_averaged(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4) if kind == "linear" else nn.Conv2d(2, 4, (2, 3), stride=2, padding=1, dilation=(1, 2))
    module = Pooled(layer).double().eval()
    x = torch.randn(1, 6, 5).double() if kind == "linear" else torch.randn(1, 2, 7, 8).double()
    rows = Rows(x, torch.tensor([1]))
    A, B = kronecker_factors(module, blocks_of(Spec.of(module)), rows, sharing="reduce")["layer"]
    slopes = torch.autograd.grad(F.cross_entropy(module(x), rows.y), [layer.weight, layer.bias])
    gradient = torch.cat([slopes[0].flatten(1), slopes[1][:, None]], 1).flatten()
    assert torch.allclose(torch.kron(B[0], A[0]), torch.outer(gradient, gradient), rtol=1e-9, atol=1e-14)
    expanded = kronecker_factors(module, blocks_of(Spec.of(module)), rows)["layer"]
    assert not torch.allclose(torch.kron(expanded[1][0], expanded[0][0]), torch.outer(gradient, gradient), rtol=1e-2)


def test_reduce_and_expand_agree_where_there_is_one_position() -> None:
    module, spec = ready(linear_net)
    one, other = (kronecker_factors(module, blocks_of(spec), examples(), sharing=s) for s in ("expand", "reduce"))
    assert all(torch.allclose(a, b) for layer in one for a, b in zip(one[layer], other[layer], strict=True))


def test_an_embedding_counts_its_tokens_and_not_the_one_that_pads() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 2)).double().eval()
    rows = Rows(torch.tensor([[1, 3], [3, 0], [3, 2]]), torch.tensor([0, 1, 1]))
    A, _ = kronecker_factors(module, blocks_of(Spec.of(module)), rows, batch=2)["0.weight"]
    seen = torch.tensor([0.0, 1.0, 1.0, 3.0, 0.0], dtype=torch.float64)
    assert A.is_diagonal
    assert torch.allclose(A.rest[0] / A.rest.sum(), seen / 5)
    whole = kronecker_factors(module, blocks_of(Spec.of(module)), rows)["0.weight"]
    S = 5 / 3
    assert torch.allclose(whole[0].rest[0], seen / (3 * S**2))
    gradients = torch.zeros(3, 3, dtype=torch.float64)
    for x, y in zip(rows.x, rows.y, strict=True):
        out = module[0](x[None]).detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(module[2](out.flatten(1)), y[None]), out)
        gradients += slope[0][x != 0].mT @ slope[0][x != 0]
    assert torch.allclose(whole[1][0], S * gradients / 3)


def brought(evidence: KroneckerFactors, spec: Spec, rows: Rows) -> tuple[bytes, Brief, dict[str, Tensor]]:
    torch.manual_seed(0)
    brief = Brief(0, spec, spec.build().state_dict(), classes=3)
    work = Work(LocalSettings(batch_size=4, optimizer={"lr": 0.05}), evidence=(evidence,))
    answer = client_round(work, brief, "site", rows)
    return answer.payload, brief, answer.memory


def narrow(rows: Rows) -> Rows:
    return Rows(rows.x.float(), rows.y)


def test_the_payload_of_the_cifar_lenet() -> None:
    spec = Spec("lenet", {"channels": 3, "size": 32})
    rows = Rows(torch.rand(4, 3, 32, 32), torch.arange(4))
    packet = decode(brought(KroneckerFactors(min_rows=1), spec, rows)[0])
    own, notes = split(packet)
    assert sum(t.numel() for t in own.values()) == 62_006
    assert sum(t.numel() for t in notes.values()) == 117_081
    assert {t.dtype for t in notes.values()} == {torch.float32}


@pytest.mark.parametrize("half", [False, True])
def test_leading_eigenpairs_are_small_and_pass_the_door(half: bool) -> None:
    spec = Spec("lenet", {"channels": 3, "size": 32})
    rows = Rows(torch.rand(40, 3, 32, 32), torch.arange(40) % 10)
    evidence = KroneckerFactors(rank=8, half=half, min_rows=1)
    payload, brief, _ = brought(evidence, spec, rows)
    own, notes = split(decode(payload))
    assert dict(evidence.expects(brief)) == {n: Form.of(t) for n, t in notes.items()}
    assert evidence.check(notes, 40.0) is None
    sizes = [sum(t.numel() * t.element_size() for t in part.values()) for part in (own, notes)]
    assert 1 + sizes[1] / sizes[0] < (1.08 if half else 1.16)
    full = split(decode(brought(KroneckerFactors(min_rows=1), spec, rows)[0]))[1]
    A = unpack(full["kron/fc1/in"], 401).double()
    found = admit(Envelope("site", payload), Contract.of(brief, (evidence,))).posterior.geometry.factors["fc1"][0]
    assert isinstance(found, LowRank)
    assert torch.allclose(found.double().trace(), A.trace(), rtol=2e-3)
    assert float((dense(found.double()) - A).norm() / A.norm()) < 0.05


@pytest.mark.parametrize("choose", [False, True])
def test_what_is_brought_is_what_the_door_expects(choose: bool) -> None:
    evidence, spec = KroneckerFactors(choose=choose, min_rows=1), Spec.of(conv_net())
    payload, brief, memory = brought(evidence, spec, narrow(examples()))
    notes = split(decode(payload))[1]
    assert dict(evidence.expects(brief)) == {n: Form.of(t) for n, t in notes.items()}
    assert evidence.check(notes, 9.0) is None
    assert memory == {}
    update = admit(Envelope("site", payload), Contract.of(brief, (evidence,)))
    factors = update.posterior.geometry.factors
    assert isinstance(update.posterior.geometry, Kron)
    assert set(factors) == {"0", "2", "5", "7", "3.weight", "3.bias"}
    assert len(factors) == 6
    assert torch.equal(factors["7"][0], unpack(notes["kron/7/in"], 7))
    assert factors["2"][0].shape == (2, 12, 12)
    with pytest.raises(KeyError):
        factors["elsewhere"]


def test_the_same_rows_bring_the_same_bytes_and_sampling_is_seeded() -> None:
    spec = Spec.of(conv_net())
    for evidence in (KroneckerFactors(min_rows=1), KroneckerFactors("sampled", min_rows=1)):
        assert (
            brought(evidence, spec, narrow(examples()))[0][-4000:]
            == brought(evidence, spec, narrow(examples()))[0][-4000:]
        )


@pytest.mark.parametrize("margin", [40.0, 60.0, 90.0])
def test_a_client_that_fits_its_rows_perfectly_still_passes_the_door(margin: float) -> None:
    """Its gradients are e^−margin and smaller, and their squares smaller than any float32."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        module[3].bias.copy_(torch.tensor([margin, 0.0]))
    spec = Spec.of(module)
    draw = torch.Generator().manual_seed(0)
    rows = Rows(torch.randn(12, 2, 2, 2, generator=draw), torch.zeros(12, dtype=torch.int64))
    brief = Brief(0, spec, module.state_dict(), classes=2)
    for choose in (False, True):
        evidence = KroneckerFactors(choose=choose, min_rows=1)
        work = Work(LocalSettings(optimizer={"lr": 1e-9}), evidence=(evidence,))
        update = admit(
            Envelope("site", client_round(work, brief, "site", rows).payload), Contract.of(brief, (evidence,))
        )
        B = update.posterior.geometry.factors["3"][1]
        assert is_psd(B)
        assert float(B.abs().max()) == 0.0 or float(B.abs().max()) >= 1e-30


def flawed(change: Callable[[dict[str, Tensor]], None], choose: bool = False) -> object:
    evidence = KroneckerFactors(choose=choose, min_rows=1)
    notes = dict(split(decode(brought(evidence, Spec.of(conv_net()), narrow(examples()))[0]))[1])
    change(notes)
    return evidence.check(notes, 9.0)


def test_a_factor_with_a_negative_eigenvalue_is_named() -> None:
    def negative(notes: dict[str, Tensor]) -> None:
        triangle = notes["kron/5/out"].clone()
        triangle[0] = -triangle[0]
        notes["kron/5/out"] = triangle

    flaw = flawed(negative)
    assert flaw.field == "kron/5/out"
    assert flaw.got == "not positive semi-definite"


def test_a_negative_or_giant_trace_is_named() -> None:
    for factor, words in ((-1.0, "a trace of -"), (1e20, "a trace of ")):

        def scaled(notes: dict[str, Tensor], factor: float = factor) -> None:
            notes["kron/2/in"] = notes["kron/2/in"] * factor

        flaw = flawed(scaled)
        assert flaw.field == "kron/2/in"
        assert flaw.got.startswith(words)


@pytest.mark.parametrize(
    ("name", "change", "field", "words"),
    [
        ("vectors", lambda t: t * 1.1, "kron/5/in/vectors", "a column of squared length"),
        ("values", lambda t: -t, "kron/5/in/values", "-"),
        ("values", lambda t: t.flip(-1), "kron/5/in/values", "["),
        ("values", lambda t: t * 1e20, "kron/5/in", "a trace of"),
    ],
)
def test_eigenpairs_that_make_no_matrix_are_named(
    name: str, change: Callable[[Tensor], Tensor], field: str, words: str
) -> None:
    evidence = KroneckerFactors(rank=2, min_rows=1)
    notes = dict(split(decode(brought(evidence, Spec.of(conv_net()), narrow(examples()))[0]))[1])
    notes[f"kron/5/in/{name}"] = change(notes[f"kron/5/in/{name}"])
    flaw = evidence.check(notes, 9.0)
    assert flaw.field == field
    assert str(flaw.got).startswith(words)


def test_a_diagonal_below_zero_is_named() -> None:
    def negative(notes: dict[str, Tensor]) -> None:
        notes["kron/3.weight/in/diagonal"] = notes["kron/3.weight/in/diagonal"] - 1.0

    assert flawed(negative).field == "kron/3.weight/in/diagonal"


def test_a_chosen_damping_must_be_positive() -> None:
    def zero(notes: dict[str, Tensor]) -> None:
        notes["kron/damping"] = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)

    assert flawed(zero, choose=True).field == "kron/damping"


def layer(out: int = 2, inn: int = 3, rows: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, inn, dtype=torch.float64, generator=draw)
    b = torch.randn(rows, out, dtype=torch.float64, generator=draw)
    move = torch.randn(out, inn, dtype=torch.float64, generator=draw) * 0.3
    return a.mT @ a / rows, b.mT @ b / rows, move


@pytest.mark.parametrize("split", ["one", "trace", "frobenius"])
@pytest.mark.parametrize("lam", [1e-4, 0.3, 20.0])
def test_the_sum_over_eigenvalues_equals_dense_gaussians(split: str, lam: float) -> None:
    """log N(D; 0, Λ⁻¹) − log N(0; 0, H⁻¹), with both precisions as one dense matrix."""
    A, B, move = layer()
    n = 50
    belief = LayerBelief.of(A, B, move)
    pi = belief.balances[("one", "trace", "frobenius").index(split)]
    damped_A, damped_B = damp(A, B, lam, split)
    H = n * torch.kron(damped_B, damped_A)
    prior = H - n * torch.kron(B, A)
    d = move.flatten()
    expected = 0.5 * (torch.logdet(prior) - torch.logdet(H) - d @ prior @ d)
    assert belief.log_evidence(n, lam, pi) == pytest.approx(float(expected), rel=1e-9)


def test_it_is_the_exact_evidence_of_a_linear_gaussian_model() -> None:
    """For y = X w + noise, Laplace is exact: integrate the weights out and compare two dampings."""
    draw = torch.Generator().manual_seed(1)
    n, d = 30, 3
    X = torch.randn(n, d, dtype=torch.float64, generator=draw)
    y = torch.randn(n, dtype=torch.float64, generator=draw)
    A, B = X.mT @ X / n, torch.ones(1, 1, dtype=torch.float64)

    def exact(lam: float) -> float:
        damped_A, damped_B = damp(A, B, lam)
        prior = n * (torch.kron(damped_B, damped_A) - A)
        covariance = torch.eye(n, dtype=torch.float64) + X @ torch.linalg.inv(prior) @ X.mT
        return float(-0.5 * (torch.logdet(covariance) + y @ torch.linalg.solve(covariance, y)))

    def laplace(lam: float) -> float:
        damped_A, damped_B = damp(A, B, lam)
        prior = n * (torch.kron(damped_B, damped_A) - A)
        w = torch.linalg.solve(X.mT @ X + prior, X.mT @ y)
        fit = float(-0.5 * (y - X @ w).square().sum())
        return fit + LayerBelief.of(A, B, w[None]).log_evidence(n, lam, 1.0)

    assert laplace(0.5) - laplace(0.01) == pytest.approx(exact(0.5) - exact(0.01), rel=1e-9)


def test_the_search_finds_the_best_of_a_fine_grid() -> None:
    beliefs = [LayerBelief.of(*layer(seed=s)) for s in range(3)]
    dampings, evidence = best_damping(beliefs, 50)
    assert dampings.dtype == evidence.dtype == torch.float64
    grid = [10 ** (e / 50) for e in range(-500, 100)]
    for way in range(3):
        scores = [sum(b.log_evidence(50, lam, b.balances[way]) for b in beliefs) for lam in grid]
        assert float(evidence[way]) >= max(scores) - 1e-2
        assert math.log10(float(dampings[way])) == pytest.approx(math.log10(grid[scores.index(max(scores))]), abs=0.1)


def test_layers_without_information_or_move_are_harmless() -> None:
    nothing = LayerBelief.of(torch.zeros(3, 3), torch.zeros(2, 2), torch.zeros(2, 3))
    assert nothing.balances == (1.0, 1.0, 1.0)
    assert nothing.log_evidence(10, 1e-3, 1.0) == pytest.approx(0.0, abs=1e-12)
    dampings, evidence = best_damping([nothing, LayerBelief.of(*layer())], 50)
    assert bool((dampings > 0).all())
    assert bool(evidence.isfinite().all())
