"""Training rows of a public set, some of them in the test rows' place: to choose a default without its test rows.

An experiment file takes it as `source = "experiments.held_out:rows"`, run from the folder above this one.
"""

from __future__ import annotations

import numpy as np
import torch

from fedfuse.data.sources import load

_SEED = 20_220  # which rows are held out; the same for every experiment


def rows(source: str = "fashion-mnist", count: int = 5000) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs and labels to train on, and `count` others, all of the public set's training rows."""
    train = load(source).train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(_SEED))
    own, held = order[count:], order[:count]
    return train.x[own].numpy(), train.y[own].numpy(), train.x[held].numpy(), train.y[held].numpy()
