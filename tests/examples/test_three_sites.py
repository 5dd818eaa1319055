import os
import re
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "three_sites"


def test_three_processes_three_folders_one_file_each(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "run.py", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("they reveal second moments of every layer's inputs and gradients") == 3
    score = {m: int(s) for m, s in re.findall(r"(\w+): 3 sites fused, (\d+)%", done.stdout)}
    assert score["fedlpa"] > score["fedavg"] + 20
    assert score["fedlpa"] > 60
    for site in ("north", "east", "south"):
        files = {path.name for path in (tmp_path / site).iterdir()}
        assert files == {"rows.safetensors", "start.safetensors", "update.safetensors"}
        with safe_open(tmp_path / site / "update.safetensors", "pt") as opened:
            assert not any(name in ("x", "y") for name in opened.keys())  # noqa: SIM118 - not a mapping
