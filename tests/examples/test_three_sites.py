import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "three_sites"
ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def script(name: str) -> ModuleType:
    """One of the example's files, as if it were run in its folder."""
    spec = importlib.util.spec_from_file_location(f"three_sites_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scores(said: str) -> dict[str, int]:
    return {method: int(share) for method, share in re.findall(r"(\w+): 3 sites fused, (\d+)%", said)}


@pytest.mark.slow
def test_three_processes_three_folders_one_file_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    run = script("run")
    run.prepare(tmp_path)
    command = [sys.executable, EXAMPLE / "site.py"]
    sites = [
        subprocess.Popen([*command, tmp_path / site], env=ALONE, stdout=subprocess.PIPE, text=True)
        for site in run.SITES
    ]
    said = [site.communicate(timeout=300)[0] for site in sites]
    assert [site.returncode for site in sites] == [0, 0, 0]
    assert all("they reveal second moments of every layer's inputs and gradients" in words for words in said)
    for site in run.SITES:
        files = {path.name for path in (tmp_path / site).iterdir()}
        assert files == {"rows.npz", "federation", "update.safetensors"}
        with safe_open(tmp_path / site / "update.safetensors", "pt") as opened:
            assert not {"x", "y"} & set(opened.keys())  # no row leaves its folder
    capsys.readouterr()
    script("fuse").main(tmp_path)
    found = scores(capsys.readouterr().out)
    assert found["fedlpa"] > found["fedavg"] + 20
    assert found["fedlpa"] > 60


@pytest.mark.slow
def test_the_example_runs_as_its_readme_says(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE / "run.py", tmp_path]
    done = subprocess.run(command, env=ALONE, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert scores(done.stdout).keys() == {"fedavg", "fedlpa"}
