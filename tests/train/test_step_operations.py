"""What crosses stages at the end of an iteration, in the Megatron that is installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trainings import SCRIPT, needs_training

from megatron_adaptra.adapter.compat.profiles import installed_version

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from iteration_end import watch  # noqa: E402


def documented(release: str) -> set[tuple[str, str]]:
    """Where and what, from the rows of a release in the table of docs/iteration-end.md."""
    text = (ROOT / "docs/iteration-end.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|.*\| (.+?) \|$", text, re.M)
    return {(where, what) for where, what, of in rows if release in of.split(", ") or of == "all"}


@needs_training
def test_the_documented_operations_are_all() -> None:
    release = ".".join(str(installed_version()).split(".")[:2])
    rows = watch(SCRIPT, sys.executable)
    seen = {
        (row["place"], " ".join(x for x in (row["function"], row["op"], row["type"]) if x))
        for row in rows
    }
    assert len(seen) >= 5
    new = seen - documented(release)
    assert not new, f"{release} has operations that docs/iteration-end.md does not know: {new}"


def test_operations_of_every_release_that_is_supported() -> None:
    for release in ("0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20"):
        assert len(documented(release)) >= 5, release
