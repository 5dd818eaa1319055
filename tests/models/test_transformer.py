"""Transformers of ours: what each position may see, whom heads serve, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfuse.core.inputs import own_form, reads_tokens
from fedfuse.core.params import Layout
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.models import text_classifier, transformer

SMALL = {"tokens": 11, "length": 6, "width": 8, "heads": 2, "depth": 2}


def test_no_position_sees_a_later_one() -> None:
    torch.manual_seed(0)
    net = transformer(**SMALL).double().eval()
    x = torch.randint(0, 11, (3, 6))
    changed = x.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    before, after = net(x), net(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_its_attention_is_torchs() -> None:
    torch.manual_seed(0)
    attention = transformer(**SMALL).double().blocks[0].attention
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([attention.query.weight, attention.key.weight, attention.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([attention.query.bias, attention.key.bias, attention.value.bias]))
        theirs.out_proj.load_state_dict(attention.out.state_dict())
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(attention(x, seen), theirs(x, x, x, attn_mask=~seen, need_weights=False)[0])


def test_padding_says_nothing_of_a_class() -> None:
    torch.manual_seed(0)
    net = text_classifier(**SMALL, classes=3).double().eval()
    x = torch.randint(1, 11, (4, 6))
    x[:, 4:] = 0
    long = net(x)
    assert long.shape == (4, 3)
    short = text_classifier(**SMALL | {"length": 4}, classes=3).double().eval()
    state = net.state_dict()
    state["positions.weight"] = state["positions.weight"][:4]
    short.load_state_dict(state)
    torch.testing.assert_close(short(x[:, :4]), long)
    assert bool(net(torch.zeros(1, 6, dtype=torch.int64)).isfinite().all()), "a text of nothing has an answer too"


def test_tied_tokens_are_one_tensor() -> None:
    net = transformer(**SMALL, tied=True)
    assert net.classifier.weight is net.tokens.weight
    assert Layout.of(net).tied == (("tokens.weight", "classifier.weight"),)


def test_what_it_reads_is_told_by_its_options() -> None:
    spec = Spec("transformer", SMALL)
    form = own_form(spec)
    assert form is not None
    assert (form.shape, form.tokens) == ((6,), 11)
    assert reads_tokens(spec, (6,))
    drawn = form.noise(5, torch.Generator().manual_seed(0))
    assert (drawn.dtype, tuple(drawn.shape)) == (torch.int64, (5, 6))
    assert int(drawn.max()) < 11


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"tokens": 0}, {"dropout": 1.0}, {"tied": "no"}, {"depth": 1.5}])
def test_options_that_cannot_be_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"model transformer: {next(iter(wrong))}"):
        transformer(**SMALL | wrong)  # type: ignore[arg-type]
