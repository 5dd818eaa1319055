from __future__ import annotations

import io
import sys

import pytest

from fedfuse.data.stores import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("in_bytes", [False, True])
def test_a_terminal_sees_a_bar(monkeypatch, in_bytes):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with bar("reading tiny", 10, done=2, in_bytes=in_bytes) as advance:
        advance(8)
    assert "reading tiny" in terminal.getvalue()


def test_elsewhere_there_is_silence(capsys):
    with bar("reading", None) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")
