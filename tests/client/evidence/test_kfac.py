from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.client.evidence.kfac import KroneckerFactors, kronecker_factors
from fedfuse.core.messages import Brief, Envelope, Form
from fedfuse.core.posterior import Kron
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.linalg.psd import is_psd, unpack
from fedfuse.nets.blocks import blocks_of
from fedfuse.server.door.admit import Contract, admit
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
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in zip(one[layer], all_[layer], strict=True))
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
    """Layers with factors and layers without: an embedding, a norm, tied weights, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight
        self.norm, self.middle = nn.LayerNorm(4), nn.Linear(4, 4)
        self.up = nn.ConvTranspose1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.norm(self.words(x))))


def test_only_linear_and_convolution_layers_with_weights_of_their_own_have_factors() -> None:
    assert [b.layer.name for b in blocks_of(Spec.of(Mixed()))] == ["middle"]
    groups = {b.layer.name: b.groups for b in blocks_of(Spec.of(conv_net()))}
    assert groups == {"0": 1, "2": 2, "5": 1, "7": 1}


def brought(evidence: KroneckerFactors, spec: Spec, rows: Rows) -> tuple[bytes, Brief, dict[str, Tensor]]:
    torch.manual_seed(0)
    brief = Brief(0, spec, spec.build().state_dict(), classes=3)
    work = Work(LocalSettings(batch_size=4, optimizer={"lr": 0.05}), evidence=(evidence,))
    payload, memory = client_round(work, brief, "site", rows)
    return payload, brief, memory


def narrow(rows: Rows) -> Rows:
    return Rows(rows.x.float(), rows.y)


def test_the_payload_of_the_cifar_lenet() -> None:
    spec = Spec("lenet", {"channels": 3, "size": 32})
    rows = Rows(torch.rand(4, 3, 32, 32), torch.arange(4))
    packet = decode(brought(KroneckerFactors(), spec, rows)[0])
    own, notes = split(packet)
    assert sum(t.numel() for t in own.values()) == 62_006
    assert sum(t.numel() for t in notes.values()) == 117_081
    assert {t.dtype for t in notes.values()} == {torch.float32}


@pytest.mark.parametrize("choose", [False, True])
def test_what_is_brought_is_what_the_door_expects(choose: bool) -> None:
    evidence, spec = KroneckerFactors(choose=choose), Spec.of(conv_net())
    payload, brief, memory = brought(evidence, spec, narrow(examples()))
    notes = split(decode(payload))[1]
    assert dict(evidence.expects(brief)) == {n: Form.of(t) for n, t in notes.items()}
    assert evidence.check(notes, 9.0) is None
    assert memory == {}
    update = admit(Envelope("site", payload), Contract.of(brief, (evidence,)))
    factors = update.posterior.geometry.factors
    assert isinstance(update.posterior.geometry, Kron)
    assert set(factors) == {"0", "2", "5", "7"}
    assert len(factors) == 4
    assert torch.equal(factors["7"][0], unpack(notes["kron/7/in"], 7))
    assert factors["2"][0].shape == (2, 12, 12)
    with pytest.raises(KeyError):
        factors["elsewhere"]


def test_the_same_rows_bring_the_same_bytes_and_sampling_is_seeded() -> None:
    spec = Spec.of(conv_net())
    for evidence in (KroneckerFactors(), KroneckerFactors("sampled")):
        assert (
            brought(evidence, spec, narrow(examples()))[0][-4000:]
            == brought(evidence, spec, narrow(examples()))[0][-4000:]
        )


def test_factors_are_remembered_only_when_asked() -> None:
    spec = Spec.of(linear_net())
    _, _, memory = brought(KroneckerFactors(remember=True), spec, narrow(examples()))
    assert set(memory) == {f"kron/{layer}/{side}" for layer in "13" for side in ("in", "out")}


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
        evidence = KroneckerFactors(choose=choose)
        work = Work(LocalSettings(optimizer={"lr": 1e-9}), evidence=(evidence,))
        update = admit(
            Envelope("site", client_round(work, brief, "site", rows).payload), Contract.of(brief, (evidence,))
        )
        B = update.posterior.geometry.factors["3"][1]
        assert is_psd(B)
        assert float(B.abs().max()) == 0.0 or float(B.abs().max()) >= 1e-30


def flawed(change: Callable[[dict[str, Tensor]], None], choose: bool = False) -> object:
    evidence = KroneckerFactors(choose=choose)
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


def test_a_chosen_damping_must_be_positive() -> None:
    def zero(notes: dict[str, Tensor]) -> None:
        notes["kron/damping"] = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)

    assert flawed(zero, choose=True).field == "kron/damping"
