from pathlib import Path
from typing import Any

import pytest
import torch

from fedfuse.client.fisher import diagonal_fisher
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.data import load
from fedfuse.experiment.reproduce import all_figures, experiments_folder, load_figures
from fedfuse.nets.kronecker import blocks_of

FIGURES = experiments_folder() / "figures"
posteriors: Any = load_figures(FIGURES / "posteriors.py")


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


@pytest.fixture
def net() -> tuple[torch.nn.Module, Spec]:
    torch.manual_seed(0)
    module = posteriors.small_net().double().eval()
    return module, Spec.of(module)


def digits(n: int) -> Rows:
    rows = load("digits", train_limit=40).train.take(range(n))
    return Rows(rows.x.double(), rows.y)


def test_the_whole_fisher_has_the_diagonal_we_send(net: tuple[torch.nn.Module, Spec]) -> None:
    module, spec = net
    rows = digits(7)
    full, diagonal = posteriors.full_fisher(module, spec, rows), diagonal_fisher(module, rows)
    expected = torch.cat([block.matrices(diagonal).flatten() for block in blocks_of(spec)])
    assert full.shape == (340, 340)
    assert torch.allclose(full.diagonal(), expected, rtol=1e-10)


def test_one_row_makes_the_linear_block_a_kronecker_product(net: tuple[torch.nn.Module, Spec]) -> None:
    module, spec = net
    rows = digits(1)
    full, parts = posteriors.full_fisher(module, spec, rows), posteriors.kronecker_fisher(module, spec, rows)
    assert [len(p) for p in parts] == [30, 112, 148, 50]
    assert torch.allclose(full[-50:, -50:], parts[-1], rtol=1e-9, atol=1e-15)


def test_the_fisher_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = load("digits", train_limit=40)
    monkeypatch.setattr(posteriors, "load", lambda *_, **__: few)
    (path,) = all_figures()["fedlpa-fisher"].draw(tmp_path)
    assert is_png(path)


@pytest.mark.parametrize("name", ["fedlpa-gaussians", "barycenters-toy"])
def test_gaussians_are_drawn(tmp_path: Path, name: str) -> None:
    (path,) = all_figures()[name].draw(tmp_path)
    assert path == tmp_path / f"{name}.png"
    assert is_png(path)
