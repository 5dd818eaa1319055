"""What an input looks like, and how networks read it, known from their options or found by asking them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.inputs import (
    ArrayForm,
    InputForm,
    PictureForm,
    as_read,
    example_inputs,
    own_form,
    reads_tokens,
    run_once,
    shape_read,
)
from fedfuse.core.messages import ClientUpdate
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.seams import Work
from fedfuse.core.settings import validate_settings
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.cost import cohort_flops, layer_costs
from fedfuse.nets.forward import cost_of


def test_any_numbers_are_brought_into_the_range_of_their_channel() -> None:
    form = InputForm((2, 3, 3), low=(-1.0, 10.0), high=(1.0, 14.0))
    x = form.squash(torch.randn(50, 2, 3, 3, generator=torch.Generator().manual_seed(0)) * 9)
    for channel, (low, high) in enumerate([(-1, 1), (10, 14)]):
        assert x[:, channel].min() >= low
        assert x[:, channel].max() <= high
    assert form.squash(torch.zeros(1, 2, 3, 3))[0, :, 0, 0].tolist() == [0.0, 12.0]


def test_features_have_ranges_too() -> None:
    form = InputForm((3,), low=(0.0, 0.0, -2.0), high=(1.0, 2.0, 0.0))
    assert form.squash(torch.zeros(1, 3)).tolist() == [[0.5, 1.0, -1.0]]


def test_noise_is_uniform_over_the_range() -> None:
    x = InputForm((1, 20, 20), (2.0,), (4.0,)).noise(20, torch.Generator().manual_seed(0))
    assert x.shape == (20, 1, 20, 20)
    assert abs(float(x.mean()) - 3) < 0.02
    assert abs(float(x.var()) - 4 / 12) < 0.01


def test_normalization_has_one_number_for_each_channel() -> None:
    for wrong in ({"mean": [0.1, 0.2], "std": [1.0, 1.0]}, {"mean": [0.1], "std": []}, {"mean": [0.1], "std": [0.0]}):
        with pytest.raises(ConfigError):
            validate_settings(PictureForm, {"height": 2, "width": 2, "channels": 1, **wrong})
    with pytest.raises(ConfigError, match="expected 3, one for each channel"):
        validate_settings(ArrayForm, {"shape": [3], "mean": [0.0], "std": [1.0]})
    assert ArrayForm(shape=(2,), mean=(0.0, 0.0), std=(1.0, 2.0)).bounds().low == (-3.0,)
    assert PictureForm(height=2, width=2, channels=3).bounds().high == (1.0,)


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
    assert shape_read(LENET, (63,)) == (63,), "not as many numbers: nothing is known"


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


def test_examples_are_the_same_in_every_process_and_move_no_stream() -> None:
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


def test_rounds_of_networks_that_cannot_run_here_have_no_known_cost() -> None:
    update = ClientUpdate("a", Posterior({}), 4.0, 1, Spec.of(Picky()))
    assert cohort_flops([update], Work(), (3,)) is None
