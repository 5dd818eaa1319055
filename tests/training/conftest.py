"""Networks of users' own, where tests and worker processes can import them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # workers inherit it and find `own_networks`
