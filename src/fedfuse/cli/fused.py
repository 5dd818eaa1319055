"""What `fuse` does around a fusion: numbers of examples read, the result written, and said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedfuse.cli import console
from fedfuse.errors import ConfigError

if TYPE_CHECKING:  # it brings torch, which a person who asks for help need not wait for
    from fedfuse.api import Fused, Update
    from fedfuse.federation.agreement import FederationFolder


def read_agreed(folder: Path | None, trusted: list[str]) -> FederationFolder | None:
    """What the sites agreed on, if they did; it brings experiments and their data, which a merge does not wait for."""
    if folder is None:
        return None
    from fedfuse.federation.agreement import read_federation

    return read_federation(folder, trusted=trusted)


def save(fused: Fused | Update, output: Path, shard_size: str, dtype: str | None) -> None:
    """Write what was fused; of folders a folder, tensor by tensor, with a bar that fills."""
    from fedfuse.api import Fused
    from fedfuse.data.progress import bar

    if not isinstance(fused, Fused):
        fused.save(output)
        return
    with bar(f"fusing into {output}", fused.num_bytes(dtype) if fused.folders else None, in_bytes=True) as watch:
        fused.save(output, shard_size=shard_size, dtype=dtype, watch=watch)


@dataclass(frozen=True, slots=True)
class Account:
    """Where a site writes down what left it, and how much may.

    Attributes:
        ledger: the file, by default one in the federation folder.
        budget: the most ε of all releases together.
        federation: the folder.
    """

    ledger: Path | None
    budget: float | None
    federation: Path | None

    def charge(self, update: Update, output: Path) -> None:
        """Add what is about to be written to the ledger, and say how much that makes."""
        from fedfuse.federation.privacy import charge

        if self.ledger is None and self.budget is None:
            return
        if self.ledger is None and self.federation is None:
            raise ConfigError("--budget is of all releases together; name the ledger that has them (--privacy-ledger)")
        path = self.ledger or Path(str(self.federation)) / "site-privacy.json"
        total = charge(update.release, path, f"{output.name} by {update.about.method}", self.budget)
        console.note(f"privacy of any one row so far: ε = {total.epsilon:.4g} at δ = {total.delta:g} ({path})", "dim")


def evidence_files(given: list[str] | None) -> list[Path] | None:
    """Files of evidence, one option each or with commas between."""
    return [Path(word.strip()) for text in given or [] for word in text.split(",")] or None


def numbers_of_examples(given: list[str] | None) -> list[float] | None:
    """Numbers of examples, one option each or with commas between."""
    words = [word for text in given or [] for word in text.split(",")]
    try:
        return [float(word) for word in words] or None
    except ValueError as why:
        raise ConfigError(f"--num-examples is {','.join(words)!r}, expected numbers as in 100,300") from why


def say_fused(fused: Fused, output: Path, count: int, how: str, as_json: bool) -> None:
    """Say who was fused, who was not, and what a person should know."""
    if as_json:
        facts = {"file": str(output), "refused": [dict(r) for r in fused.refused], "facts": fused.facts}
        facts |= {"clipped": [dict(c) for c in fused.clipped]}
        told = fused.about.model_dump(mode="json", include={"method", "class_names", "sites"})
        console.say_json(facts | told | {"remarks": list(fused.remarks)})
        return
    for refusal in fused.refused:
        reason = f"{refusal['client']}: {refusal['field']} is {refusal['got']}, expected {refusal['expected']}"
        console.note(f"refused {reason}", "yellow")
    for weak in fused.clipped:
        console.note(
            f"weakened {weak['client']}: {weak['field']} is {weak['got']}, expected {weak['expected']}", "yellow"
        )
    for remark in fused.remarks:
        console.warn(remark)
    if fused.about.class_names:
        named = "targets" if fused.about.task in ("regression", "multilabel") else "classes"
        console.say(f"{named}: {', '.join(fused.about.class_names)}")
    if left_out := fused.facts.get("not_aligned"):
        console.warn(f"not aligned: {', '.join(left_out)}; these units were averaged where they stand")
    if (error := fused.facts.get("adapter_error")) is not None:
        norm = "its answers to the clients' inputs" if fused.facts.get("adapter_metric") == "inputs" else "its norm"
        console.say(f"lost of the mean of the adapters: {error:.2%} of {norm}")
    console.say(f"{output}: {count - len(fused.refused)} of {count} updates {how} by {fused.about.method}")
