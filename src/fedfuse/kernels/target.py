"""What the machine has: how long vectors should be, and where compiled code is kept.

Importing this module imports numba; `fedfuse.kernels` itself does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding

from fedfuse.kernels.code_cache import code_folder

_Function = TypeVar("_Function", bound=Callable[..., Any])
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

# A tile holds 6 rows of LANES sums in registers: 12 of AVX2's 16, 24 of NEON's 32, 12 of AVX-512's 32. Inner products
# are taken STEP numbers at a time, 12 sums together.
_WIDE = binding.get_host_cpu_features().get("avx512f", False)
LANES, STEP = (32, 16) if _WIDE else (16, 8)
SUMS = 128 if _WIDE else 32  # sums of float64 that are held in registers: half of AVX-512's, half of AVX2's, of NEON's

# Sums may be taken in another order and a product rounded with its sum. Without `nnan` and `ninf`, NaN and infinity
# stay what they are: a client that diverged must be seen to have diverged.
_FAST = {"contract", "reassoc", "nsz", "arcp"}


def pad_to_lanes(count: int) -> int:
    """The next multiple of LANES: what rows of tables are filled up to with zeros.

    Example:
        >>> pad_to_lanes(1) == LANES == pad_to_lanes(LANES)
        True
    """
    return -(-count // LANES) * LANES


def compile_kernel(function: _Function) -> _Function:
    """A function translated to machine code at its first call, and kept for every later process."""
    with _cache_in(code_folder()):
        return numba.njit(cache=True, no_cfunc_wrapper=True, nogil=True, error_model="numpy", fastmath=_FAST)(function)  # type: ignore[no-any-return]


def compile_exactly(function: _Function) -> _Function:
    """As `compile_kernel`, but every product and sum is rounded by itself and in the order written."""
    with _cache_in(code_folder()):
        return numba.njit(cache=True, no_cfunc_wrapper=True, nogil=True, error_model="numpy", fastmath=False)(function)  # type: ignore[no-any-return]


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """What is decorated within keeps its code there; other users of numba keep theirs where they want."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
