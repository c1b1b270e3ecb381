"""What commands write: JSON, tables that are as wide as they need to be, and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_adaptra.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 1000  # characters; a pipe or a file has no edge that a table would have to be cut at


def print_json(data: Any) -> None:
    """One object; refuses NaN and Infinity, which are not JSON."""
    print(json.dumps(data, allow_nan=False))


def console() -> Console:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    return Console(highlight=False, markup=False, width=width)


class Table(NamedTuple):
    """The first column is words, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def show_table(table: Table) -> None:
    from rich.table import Table as RichTable

    if table.title:
        say(table.title)
    rich = RichTable()
    for i, name in enumerate(table.columns):
        rich.add_column(name, justify="right" if i else "left")
    for row in table.rows:
        rich.add_row(*row)
    console().print(rich)


def markdown(table: Table) -> str:
    """As a file in docs/ holds it."""
    lines = [table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{table.title}:\n\n{body}\n"


def say(text: str) -> None:
    console().print(text, soft_wrap=True)


def progress(words: str) -> AbstractContextManager[object]:
    """Something to look at while planning takes seconds; a pipe sees nothing of it."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(words)


def note(text: str) -> None:
    """What does not belong to the result."""
    print(f"adaptra: {text}", file=sys.stderr)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes a file; makes the folders above it, and raises BadInput."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise BadInput("--out", str(path), f"it cannot be written: {error.strerror}") from None


def write(path: Path, content: str) -> None:
    with writing(path):
        path.write_text(content, encoding="utf-8")


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def numbers(values: Iterable[float]) -> str:
    """Per stage, with commas between."""
    return ",".join(f"{value:g}" for value in values)
