"""The section of docs/evidence/gpu.md that holds what was found on GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from common import markdown
from verdict import Verdict
from where import ROOT

NAME = "docs/evidence/gpu.md"
PAGE = ROOT / NAME
HEADING = "## What scripts/gpu_check.sh found"


def section(where: str, words: Sequence[str], verdicts: Sequence[Verdict]) -> str:
    """Verdicts, then their tables; `words`: the command's."""
    command = " ".join(["scripts/gpu_check.sh", *words])
    lines = "\n".join(f"- {verdict.line}" for verdict in verdicts)
    tables = "\n".join(
        f"### {verdict.part}\n\n" + "\n".join(markdown(table) for table in verdict.tables)
        for verdict in verdicts if verdict.tables
    )  # fmt: skip
    return f"{HEADING}\n\n`{command}`, {datetime.date.today()}: {where}.\n\n{lines}\n\n{tables}"


def replaced(text: str, new: str) -> str:
    """The page with this section in place of its own of before, or at its end."""
    before, found, after = text.partition(f"{HEADING}\n")
    _, more, rest = after.partition("\n## ") if found else ("", "", "")
    return f"{before.rstrip()}\n\n{new.rstrip()}\n" + (f"\n## {rest}" if more else "")


def write(where: str, words: Sequence[str], verdicts: Sequence[Verdict]) -> None:
    PAGE.write_text(replaced(PAGE.read_text(), section(where, words, verdicts)))
