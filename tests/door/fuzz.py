"""Mutants in parts: `python tests/door/fuzz.py [--count N] [--part SIZE] [--seed FIRST] [KIND …]`.

Every part is one process, so that memory stays flat and a crash of the interpreter itself is seen. Prints after each
part how many mutants were refused, harmless and foreign; ends with code 1 if any was foreign, and shows how to see it
again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutants import KINDS, fate


def run_part(kinds: list[str], first: int, count: int) -> None:
    """One part, in this process: the counts and the foreign ones as a line of JSON."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts, foreign = Counter[str](), list[str]()
    for seed in range(first, first + count):
        kind = kinds[seed % len(kinds)]
        found, why = fate(kind, seed)
        counts[found] += 1
        if found == "foreign":
            foreign.append(f"{kind} --seed {seed} --count 1: {why[:200]}")
    sys.stdout.write(json.dumps({"counts": counts, "foreign": foreign}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; by default all")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--part", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="run in this process, without parts")
    args = parser.parse_args()
    if args.here:
        run_part(args.kinds or list(KINDS), args.seed, args.count)
        return
    total, foreign = Counter[str](), list[str]()
    for first in range(args.seed, args.seed + args.count, args.part):
        count = min(args.part, args.seed + args.count - first)
        command = [sys.executable, __file__, *args.kinds, "--here", "--seed", str(first), "--count", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            total["foreign"] += 1
            foreign.append(f"the part from {first} on ended with {done.returncode}: {done.stderr[-300:]}")
            print(f"foreign: {foreign[-1]}", flush=True)
            continue
        part = json.loads(done.stdout.splitlines()[-1])
        total.update(part["counts"])
        foreign += part["foreign"]
        for line in part["foreign"]:
            print(f"foreign: {line}", flush=True)
        told = ", ".join(f"{total[word]:,} {word}" for word in ("refused", "harmless", "foreign"))
        print(f"{sum(total.values()):,} mutants: {told}", flush=True)
    sys.exit(1 if foreign else 0)


if __name__ == "__main__":
    main()
