import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Diag, Posterior
from fedfuse.core.registry import find_method
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState

SPEC = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})


def cohort() -> tuple[Cohort, dict[str, list[torch.Tensor]]]:
    updates, fishers = [], {n: [] for n in SPEC.skeleton().state_dict()}
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        mean = {n: torch.randn(t.shape, generator=draw) for n, t in SPEC.skeleton().state_dict().items()}
        fisher = {n: torch.rand(t.shape, generator=draw) for n, t in mean.items()}
        for n, f in fisher.items():
            f.view(-1)[0] = 0.0  # nobody knows anything about it
            fishers[n].append(f.double())
        variance = {n: 1 / f for n, f in fisher.items()}
        updates.append(ClientUpdate(f"c{k}", Posterior(mean, Diag(variance)), 1.0 + k, 1, SPEC))
    return Cohort.of(updates), fishers


def test_every_weight_is_averaged_by_fisher_information_and_damping() -> None:
    who, fishers = cohort()
    recipe = find_method("laplace").recipe(damping=0.2)
    state = recipe.aggregate(who, ServerState(0, Single(SPEC, who.updates[0].posterior)), Bench())
    for name, found in state.single.posterior.mean.items():
        pull = [w * (f + 0.2) for w, f in zip(who.weights, fishers[name], strict=True)]
        expected = sum(p * u.posterior.mean[name].double() for p, u in zip(pull, who, strict=True)) / sum(pull)
        assert torch.allclose(found.double(), expected, atol=1e-6)
        plain = sum(w * u.posterior.mean[name] for w, u in zip(who.weights, who, strict=True))
        assert torch.allclose(found.view(-1)[0].double(), plain.view(-1)[0].double(), atol=1e-6)


def test_the_result_is_weights_alone() -> None:
    who, _ = cohort()
    recipe = find_method("laplace").recipe()
    state = recipe.aggregate(who, ServerState(0, Single(SPEC, who.updates[0].posterior)), Bench())
    assert not isinstance(state.single.posterior.geometry, Diag)
    assert recipe.reveals == ("mean squared gradients of every weight over the client's rows",)
