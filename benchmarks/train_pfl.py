"""Rounds of a few clients by pfl-research, timed: what `train.py --pfl PYTHON` runs in that environment.

It needs pfl and torch and nothing of ours. The first round, which also evaluates, warms up and is not counted. Printed
is a list of samples per second of processor time, in one process and thread, for each round after it.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from networks import OWN


def with_loss(network: torch.nn.Module) -> torch.nn.Module:
    """A network as pfl wants it: it knows its loss and its metrics."""

    def loss(x: Any, y: Any, eval: bool = False) -> torch.Tensor:  # noqa: ARG001
        return cross_entropy(network(torch.as_tensor(x)), torch.as_tensor(y).long())

    network.loss = loss  # type: ignore[assignment]
    network.metrics = lambda x, y: {}  # type: ignore[assignment] # noqa: ARG005
    return network


def round_seconds(network: str, rows: Path, rounds: int, batch: int, lr: float, momentum: float) -> list[float]:
    """Seconds of the processor that each round after the first takes."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    users = read_rows(rows)
    data = FederatedDataset(
        lambda user: Dataset(users[user], user_id=str(user)),
        get_user_sampler("minimize_reuse", list(users)),
    )
    net, ends = with_loss(OWN[network]()), []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            ends.append(time.process_time())
            return False, Metrics()

    model = PyTorchModel(
        net,
        local_optimizer_create=lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum),
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    never = 10**9  # evaluations on the way are nobody else's
    FederatedAveraging().run(
        NNAlgorithmParams(rounds + 1, evaluation_frequency=never, train_cohort_size=len(users), val_cohort_size=0),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_batch_size=batch, local_num_epochs=1, local_learning_rate=lr),
        NNEvalHyperParams(local_batch_size=batch),
        callbacks=[Clock()],
    )
    return [after - before for before, after in pairwise(ends)]


def read_rows(folder: Path) -> dict[str, list[torch.Tensor]]:
    """Each client's images and labels from `CLIENT.x` and `CLIENT.y`, plain numbers."""
    users = {}
    for path in sorted(folder.glob("*.y")):
        x, y = np.fromfile(path.with_suffix(".x"), np.float32), np.fromfile(path, np.int64)
        users[path.stem] = [torch.from_numpy(x).view(len(y), 1, 28, 28), torch.from_numpy(y)]
    return users


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=list(OWN))
    parser.add_argument("rows", type=Path, help="a folder with files CLIENT.x (float32) and CLIENT.y (int64)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    said = parser.parse_args()
    torch.set_num_threads(1)
    seconds = round_seconds(said.network, said.rows, said.rounds, said.batch, said.lr, said.momentum)
    samples = sum(len(y) for _, y in read_rows(said.rows).values())
    print(json.dumps([samples / second for second in seconds]))


if __name__ == "__main__":
    main()
