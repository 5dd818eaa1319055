"""What networks read, known from their options or found by asking them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.inputs import as_read, example_inputs, own_form, reads_tokens, run_once, shape_read
from fedfuse.core.messages import ClientUpdate
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.cost import cohort_flops, layer_costs
from fedfuse.nets.forward import cost_of

LENET = Spec("lenet", {"size": 8, "maps": [2, 3], "hidden": [4], "classes": 3})
MLP = Spec("mlp", {"inputs": 64, "hidden": [4], "classes": 3})
TOKENS = Spec.of(nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)))


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("I read nothing\nat all")


def test_forms_are_told_by_options_alone() -> None:
    forms = [own_form(spec) for spec in (LENET, MLP, Spec("bayesian", {"of": LENET.to_json(), "last": 1}))]
    assert [form and form.shape for form in forms] == [(1, 8, 8), (64,), (1, 8, 8)]
    assert own_form(Spec.of(nn.Linear(3, 2))) is None
    assert own_form(Spec("builtins:dict")) is None


def test_inputs_are_laid_out_as_networks_of_ours_read_them() -> None:
    flat = torch.rand(2, 64)
    assert as_read(LENET, flat).equal(flat.view(2, 1, 8, 8))
    assert as_read(MLP, flat.view(2, 1, 8, 8)).equal(flat)
    assert as_read(LENET, flat.view(2, 1, 8, 8)).equal(flat.view(2, 1, 8, 8))
    assert shape_read(LENET, (63,)) == (63,), "not as many numbers: nobody can tell"


def test_a_sequence_that_begins_with_a_linear_layer_reads_rows() -> None:
    deep = Spec.of(nn.Sequential(nn.Sequential(nn.Linear(64, 3))))
    assert shape_read(deep, (1, 8, 8)) == (64,)
    assert shape_read(Spec.of(nn.Sequential(nn.Conv2d(1, 2, 3))), (64,)) == (64,)
    assert shape_read(Spec("builtins:dict"), (2, 3)) == (2, 3)


def test_one_network_answers_inputs_in_either_layout() -> None:
    single, x = Single.of(LENET.build(), LENET), torch.rand(5, 1, 8, 8)
    assert single.logits(x).equal(single.logits(x.flatten(1)))


def test_tokens_are_found_by_asking() -> None:
    assert reads_tokens(TOKENS, (3,))
    assert not reads_tokens(MLP, (64,))
    assert not reads_tokens(Spec.of(Picky()), (3,))
    x = example_inputs(TOKENS, (3,), 8)
    assert (x.dtype, x.unique().tolist()) == (torch.int64, [0, 1])


def test_examples_are_the_same_for_everybody_and_move_no_stream() -> None:
    stirred = torch.random.get_rng_state()
    assert example_inputs(MLP, (64,), 3).equal(example_inputs(MLP, (64,), 3))
    assert example_inputs(MLP, (64,), 3, torch.bfloat16).dtype == torch.bfloat16
    assert example_inputs(TOKENS, (3,), 3, torch.int32).dtype == torch.int32
    run_once(TOKENS, (3,))
    assert torch.random.get_rng_state().equal(stirred)


def test_what_cannot_be_run_is_told_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot read an input of shape \(3,\): ValueError: I read nothing$"):
        run_once(Spec.of(Picky()), (3,))


def test_costs_of_token_networks_are_counted() -> None:
    assert cost_of(TOKENS, (3,)).outputs == 3
    assert layer_costs(TOKENS, (3,))["2"].weights == 36


def test_rounds_of_networks_that_nobody_can_run_here_cost_nobody_knows_what() -> None:
    update = ClientUpdate("a", Posterior({}), 4.0, 1, Spec.of(Picky()))
    assert cohort_flops([update], Work(), (3,)) is None
