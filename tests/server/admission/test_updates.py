import pytest
import torch
from torch import Tensor

from fedfuse.core.messages import Form
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, QuorumLost
from fedfuse.server.admission.admit import Rules
from fedfuse.server.admission.opened import Item, first_difference
from fedfuse.server.admission.updates import gather
from fedfuse.wire.codec import encode, fingerprint, forms_of


def method(name: str) -> Recipe:
    return find_method(name).recipe()


def item(client: str, tensors: dict[str, Tensor], num_examples: float | None = None, **header: object) -> Item:
    return Item(client, encode(tensors, header), num_examples)


def weights(value: float, size: int = 2) -> dict[str, Tensor]:
    return {"w": torch.full((size,), value)}


def test_the_majority_is_the_contract() -> None:
    items = [item("a", weights(1.0)), item("b", weights(2.0, 3)), item("c", weights(3.0))]
    admission, brief, *_ = gather(items, method("fedavg"), None, (), Rules())
    assert admission.cohort.clients == ("a", "c")
    assert [(r["client"], r["field"], r["got"]) for r in admission.refused] == [("b", "w", "3 float32")]
    assert forms_of(brief.params)["w"] == Form((2,), torch.float32)


def test_without_a_majority_or_without_files_there_is_no_quorum() -> None:
    with pytest.raises(QuorumLost, match="compared with a, b: w is 3 float32, expected 2 float32"):
        gather([item("a", weights(1.0)), item("b", weights(1.0, 3))], method("fedavg"), None, (), Rules())
    with pytest.raises(QuorumLost, match="0 of 1 updates can be fused .* a: file is damaged"):
        gather([Item("a", b"")], method("fedavg"), None, (), Rules())


def test_mixed_networks_need_no_majority() -> None:
    specs = [Spec("mlp", {"inputs": 2, "hidden": [k], "classes": 2}) for k in (1, 2)]
    items = [
        item(f"c{k}", dict(s.skeleton().state_dict()), spec=s.to_json(), classes=2 + k) for k, s in enumerate(specs)
    ]
    admission, brief, *_ = gather(items, method("ensemble"), None, (), Rules())
    assert [u.spec for u in admission.cohort] == specs
    assert set(brief.own) == {"c1"}
    assert brief.classes == 3


def test_what_is_said_of_the_network_must_be_true() -> None:
    liar = item("a", weights(1.0), spec={"factory": "mlp", "options": {"inputs": 2, "hidden": [], "classes": 2}})
    with pytest.raises(ConfigError, match="do not fit the network 'mlp': classifier.bias is missing"):
        gather([liar], method("fedavg"), None, (), Rules())
    with pytest.raises(ConfigError, match="impossible round"):
        gather([item("a", weights(1.0), round=-1)], method("fedavg"), None, (), Rules())


def test_a_fingerprint_tells_weights_names_and_shapes_apart() -> None:
    one = {"w": torch.arange(4.0)}
    assert fingerprint(one) == fingerprint({"w": torch.arange(4.0)})
    others = [{"v": torch.arange(4.0)}, {"w": torch.arange(4.0).view(2, 2)}, {"w": torch.arange(1.0, 5.0)}]
    assert len({fingerprint(p) for p in (one, *others)}) == 4


def test_the_first_difference_is_told_in_words() -> None:
    small, large = ({"w": Form((n,), torch.float32)} for n in (2, 3))
    assert first_difference(small, large) == ("w", "2 float32", "3 float32")
    assert first_difference(small, {}) == ("w", "2 float32", "missing")
    assert first_difference(small, small) is None
