"""The page in a real browser: silent console, sorting tables, nothing wider than the window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path

import pytest

from fedfuse.report import write_page

pytestmark = pytest.mark.browser

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=5000",
]

Make = Callable[..., Path]


@pytest.fixture
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no chromium on the path: the page was not opened in a browser (apt-get install chromium)")
    return found


def open_page(chromium: str, page: Path) -> tuple[str, str]:
    """The page's document after its scripts ran, and what the browser logged."""
    profile = page.with_suffix(".profile")
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", "--window-size=1300,900", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout, done.stderr


def ask(chromium: str, page: Path, question: str, width: int = 1280) -> object:
    """What a JavaScript expression says inside a copy of the page, in a frame of the given width.

    A frame, because Chromium's own windows are never narrower than 500 pixels.
    """
    script = f"<script>parent.document.body.dataset.answer = JSON.stringify({question});</script></body>"
    text = re.sub(r"<meta http-equiv=.*?>", "", page.read_text(encoding="utf-8"), count=1)  # lets our script run
    inside = escape(text.replace("</body>", script))
    frame = page.with_name(f"ask-{width}.html")
    frame.write_text(
        f'<!doctype html><meta charset="utf-8"><body>'
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{inside}"></iframe>',
        encoding="utf-8",
    )
    answer = re.search(r'data-answer="([^"]*)"', open_page(chromium, frame)[0])
    assert answer is not None
    return json.loads(unescape(answer[1]))


def columns_after(title: str, clicks: int) -> str:
    """An expression that clicks a heading of the summary and tells the first column and the heading's state."""
    return f"""(() => {{
      const table = document.querySelector("table.summary");
      const heading = [...table.tHead.rows[0].cells].find((cell) => cell.textContent.startsWith({json.dumps(title)}));
      const button = heading.querySelector("button");
      for (let k = 0; k < {clicks}; k += 1) button.click();
      const sorted = [...table.tHead.rows[0].cells].filter((cell) => cell.hasAttribute("aria-sort")).length;
      return {{ rows: [...table.tBodies[0].rows].map((row) => row.cells[0].innerText.replace(/\\s/g, "")),
        state: heading.getAttribute("aria-sort"), sorted, reachable: button.tabIndex >= 0 }};
    }})()"""


@pytest.fixture
def page(tmp_path: Path, make_run: Make) -> Path:
    return write_page([make_run(tmp_path / "a"), make_run(tmp_path / "b", rounds=4, seeds=8)], tmp_path / "page.html")


def test_the_console_stays_silent(chromium: str, page: Path, hostile: str) -> None:
    document, log = open_page(chromium, page)
    assert 'class="scripted"' in document  # the script ran, under the page's own security policy
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []
    title = re.search(r"<title>(.*?)</title>", document)
    assert title is not None
    assert title[1] == "2 runs compared · fedfuse"  # no client's name ran as code
    assert hostile not in document


def test_a_heading_sorts_both_ways(chromium: str, page: Path) -> None:
    best_first = ["fedlpa(damping=0.001)", "ensemble", "scaffold", "fedprox(mu=0.01)", "fedavg"]
    once = ask(chromium, page, columns_after("NLL", 1))
    assert once == {"rows": best_first, "state": "ascending", "sorted": 1, "reachable": True}
    twice = ask(chromium, page, columns_after("NLL", 2))
    assert twice == {"rows": best_first[::-1], "state": "descending", "sorted": 1, "reachable": True}
    named = ask(chromium, page, columns_after("method", 1))
    assert named == {"rows": sorted(best_first), "state": "ascending", "sorted": 1, "reachable": True}


def test_one_seed_is_shown_at_a_time(chromium: str, page: Path) -> None:
    shown = ask(
        chromium,
        page,
        """(() => {
          const group = document.querySelector(".pick");
          group.querySelectorAll("button")[5].click();
          return [...group.querySelectorAll("figure")].filter((one) => !one.hidden).map((one) => one.dataset.name);
        })()""",
    )
    assert shown == ["5"]


def test_eight_columns_are_shown_and_others_can_be(chromium: str, page: Path) -> None:
    told = ask(
        chromium,
        page,
        """(() => {
          const table = document.querySelector("table.choosable");
          const shown = () => [...table.tHead.rows[0].cells].filter((cell) => !cell.hidden).length;
          const before = shown();
          const boxes = [...document.querySelector(".chooser").querySelectorAll("input")];
          boxes.find((box) => !box.checked).click();
          return { before, after: shown(), cells: [...table.tBodies[0].rows[0].cells].filter((c) => !c.hidden).length };
        })()""",
    )
    assert told == {"before": 9, "after": 10, "cells": 10}  # the method, and eight


def test_the_summary_fits_a_laptop(chromium: str, tmp_path: Path, make_run: Make) -> None:
    page = write_page([make_run(tmp_path / "run", rounds=2)], tmp_path / "page.html")
    box = "document.querySelector('table.summary').parentElement"
    assert ask(chromium, page, f"{box}.scrollWidth <= {box}.clientWidth", 1280) is True


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(chromium: str, tmp_path: Path, make_run: Make, width: int) -> None:
    run = make_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("scaffold", "s" * 120).replace("client-03", "c" * 200))
    page = write_page([run, make_run(tmp_path / "other", rounds=3, clients=60)], tmp_path / "page.html")
    question = "{inner: innerWidth, scroll: document.documentElement.scrollWidth}"
    measured = ask(chromium, page, question, width)
    assert isinstance(measured, dict)
    assert measured["inner"] == width
    assert measured["scroll"] <= width
