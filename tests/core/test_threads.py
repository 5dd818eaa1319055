"""One thread for a while."""

from __future__ import annotations

import pytest
import torch

from fedfuse.core.torch_utils import one_thread


def test_the_number_of_threads_comes_back_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: now.__setitem__(0, n))
    with one_thread():
        assert now == [1]
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert now == [4]
