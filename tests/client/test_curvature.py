import torch
from torch import Tensor, nn

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import TaskLoss
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local
from fedfuse.linalg.psd import pack
from fedfuse.methods.fedlpa import PosteriorPull
from fedfuse.nets.kronecker import blocks_of


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
