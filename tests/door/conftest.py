"""Mutants are shared by the tests of this folder and by the script that runs a million of them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
