"""The section of docs/evidence/gpu.md that holds what was found on GPUs."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_check.result import Result
from gpu_check.target import ROOT

from benchmarks.common import markdown

NAME = "docs/evidence/gpu.md"
PAGE = ROOT / NAME
HEADING = "## Results of scripts/gpu_check.sh"
FILES = (".md", ".json")


def block(target: str, words: Sequence[str], result: Result) -> str:
    """A part's: its result, date, target, its tables. `words`: the command's."""
    command = " ".join(["scripts/gpu_check.sh", *words])
    tables = "\n".join(markdown(table) for table in result.tables)
    took = f"{result.seconds:.0f} s" if result.seconds else ""
    head = f"{result.line}\n\n`{command}`, {datetime.date.today()}{took and f', {took}'}: {target}."
    return f"{head}\n\n{tables}".strip()


def replaced(text: str, blocks: Mapping[str, str], order: Sequence[str]) -> str:
    """The page with the `blocks` of parts in place of theirs of before; others stay."""
    before, found, after = text.partition(f"{HEADING}\n")
    body, more, rest = after.partition("\n## ") if found else ("", "", "")
    parts = dict(_named(part) for part in re.split(r"^### ", body, flags=re.MULTILINE)[1:])
    parts |= blocks
    known = [f"### {part}\n\n{parts[part]}\n" for part in order if part in parts]
    section = "\n".join([f"{HEADING}\n", *known])
    return f"{before.rstrip()}\n\n{section}" + (f"\n## {rest}" if more else "")


def _named(part: str) -> tuple[str, str]:
    name, _, rest = part.partition("\n")
    return name.strip(), rest.strip()


def write(
    target: str, words: Sequence[str], results: Sequence[Result], order: Sequence[str]
) -> None:
    """`order`: of all parts there are."""
    blocks = {result.part: block(target, words, result) for result in results}
    PAGE.write_text(replaced(PAGE.read_text(), blocks, order))


def write_apart(
    out: Path, target: str, words: Sequence[str], results: Sequence[Result], order: Sequence[str]
) -> list[Path]:
    """The same section as a file of its own, and all of it as JSON beside it; returns both.

    `out`: a folder, which may be new, or the name of one of the two files.
    """
    if out.suffix not in FILES:
        out = out / "gpu_check.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    text, data = (out.with_suffix(suffix) for suffix in FILES)
    blocks = {result.part: block(target, words, result) for result in results}
    text.write_text(replaced("", blocks, order).lstrip())
    found = {"date": f"{datetime.date.today()}", "target": target, "words": list(words),
             "parts": [result.data() for result in results]}  # fmt: skip
    data.write_text(json.dumps(found, indent=1) + "\n")
    return [text, data]
