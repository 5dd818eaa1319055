"""Layer by layer from files: the same numbers as in a run, one exchange after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedfuse
from fedfuse.core.messages import Envelope
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, QuorumLost, RecipeError
from fedfuse.methods.fedavg import fedavg
from fedfuse.methods.refit import refit
from fedfuse.server.admission.admit import admit_all
from fedfuse.training.round import client_round
from fedfuse.wire.codec import read

SPEC = Spec("mlp", {"inputs": 3, "hidden": [4, 5], "classes": 2})
LOCAL = LocalSettings(epochs=3, batch_size=5, optimizer={"lr": 0.2})
NAMES = ("a", "b", "c")
LAYERS = refit(layers=True)


def rows(k: int) -> Rows:
    draw = torch.Generator().manual_seed(k)
    return Rows(torch.randn(20 + 5 * k, 3, generator=draw) + k, torch.randint(2, (20 + 5 * k,), generator=draw))


def start() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(SPEC.build().state_dict())


def run_exchanges(count: int) -> list[Params]:
    """The model after training and after every exchange, as a server that speaks to its clients has it."""
    recipe, memories = fedavg().ending(1, LAYERS), dict[str, Params]()
    net = SPEC.build()
    net.load_state_dict(start())
    state, found = ServerState(0, Single.of(net, SPEC)), list[Params]()
    for round_ in range(count):
        now = recipe.at(round_)
        brief, sent = state.brief(now.publishes, 2), []
        for k, name in enumerate(NAMES):
            answer = client_round(now.work(LOCAL), brief, name, rows(k), memory=memories.get(name))
            memories[name] = answer.memory
            sent.append(Envelope(name, answer.payload))
        cohort = admit_all(sent, brief, now.evidence, NAMES, trains=now.trains).cohort
        state = replace(now.aggregate(cohort, state, Bench(classes=2)), round=round_ + 1)
        found.append(state.single.posterior.mean)
    return found


def test_files_give_what_a_run_gives(tmp_path: Path) -> None:
    trained = [
        fedfuse.local_update(SPEC, rows(k), client=name, start=start(), epochs=3, batch_size=5, lr=0.2)
        for k, name in enumerate(NAMES)
    ]
    model = fedfuse.fuse(trained).save(tmp_path / "0.safetensors")
    wanted = run_exchanges(4)
    assert all(tensor.equal(wanted[0][n]) for n, tensor in fedfuse.fuse(trained).state_dict().items())
    for turn in range(3):
        sent = [bring(model, k, name, trained[k]) for k, name in enumerate(NAMES)]
        fused = fedfuse.fuse(sent, LAYERS, start=model)
        assert all(tensor.equal(wanted[1 + turn][n]) for n, tensor in fused.state_dict().items())
        if turn < 2:
            with pytest.raises(RecipeError, match="reads more of its clients than one sum"):
                fused.partial()
        model = fused.save(tmp_path / f"{turn + 1}.safetensors")


def bring(model: Path, k: int, name: str, own: fedfuse.Update) -> fedfuse.Update:
    from fedfuse.wire.messages import read_memory

    published = read_memory(read(model).header["facts"].get("published"))
    how = {"client": name, "weights": model, "own": own.state_dict(), "published": published}
    return fedfuse.bring_evidence(SPEC, rows(k), LAYERS, **how)  # type: ignore[arg-type]


def test_answers_of_another_turn_are_refused(tmp_path: Path) -> None:
    trained = [fedfuse.local_update(SPEC, rows(k), client=name, start=start()) for k, name in enumerate(NAMES)]
    model = fedfuse.fuse(trained).save(tmp_path / "0.safetensors")
    sent = [bring(model, k, name, trained[k]) for k, name in enumerate(NAMES)]
    late = sent[2].telling(memory={"turn/done": 1})
    assert fedfuse.fuse([*sent[:2], late], LAYERS, start=model).refused[0]["field"] == "memory"
    with pytest.raises((ConfigError, QuorumLost), match="expected whole numbers"):
        fedfuse.fuse([u.telling(memory={"turn/done": "x"}) for u in sent], LAYERS, start=model)
