"""What every worker needs, imported and woken up once, in the process that workers are forked off.

What is not touched after a fork is one memory for all of them.
"""

from __future__ import annotations

import gc

import fedfuse.engines.worker  # noqa: F401
from fedfuse.kernels import why_not


def wake_kernels() -> None:
    """Have numba learn its types, which its first function costs more time than loading all of ours."""
    if why_not():
        return
    import numpy as np

    from fedfuse.kernels.chain.buffers import rows_in

    some = np.zeros(1, np.float32)
    rows_in(1, some, np.zeros(1, np.int64), 0, 1, 1, some)


wake_kernels()
gc.collect()
gc.freeze()  # a collection in a worker would write to all that could be shared
