"""The documentation site: built without a warning, complete, and without anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedfuse.core.catalogue import list_catalogue

pytest.importorskip("mkdocs", reason="the site is built by MkDocs: pip install 'fedfuse[docs]'")
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    asked = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=asked, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pages = {path.relative_to(tmp_path / "site").as_posix(): path for path in (tmp_path / "site").rglob("*.html")}
    assert {f"methods/reference/{entry['name']}.html" for entry in list_catalogue()} <= pages.keys()
    lpa = pages["methods/reference/fedlpa.html"].read_text(encoding="utf-8")
    assert all(words in lpa for words in ("Options", "second moments", "bytes up", "evidence"))
    house = pages["architecture.html"].read_text(encoding="utf-8")
    assert house.count("<rect") > 15
    assert "graph TD" not in house
    assert "local_update" in pages["reference/fedfuse.html"].read_text(encoding="utf-8")
    for path in pages.values():
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(https?:[^\"\s>]+)", path.read_text("utf-8")
        )
        assert loaded == [], f"{path.name} loads {loaded[0]} from elsewhere"
