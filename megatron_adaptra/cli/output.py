"""Output of commands: JSON, tables as wide as their cells, and files."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_adaptra.base.errors import BadFile
from megatron_adaptra.base.files import replacing
from megatron_adaptra.view.html.page import Table as Table

if TYPE_CHECKING:
    from rich.console import Console

QUIET, BETWEEN = 2.0, 10.0  # seconds before the first word on what takes long, and between two
COLUMNS = 80  # characters in a line, where neither a terminal nor $COLUMNS says how many


def print_json(data: Any) -> None:
    """Print `data` as one object; ValueError for NaN and Infinity, which are not JSON."""
    print(json.dumps(data, allow_nan=False))


def width() -> int:
    """Return the characters that fit into a line: of the terminal, or as $COLUMNS has it."""
    return max(40, shutil.get_terminal_size((COLUMNS, 24)).columns)


def console() -> Console:
    """Standard output, without colours for numbers or markup in texts."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=width())


def show_table(table: Table) -> None:
    """Print it, with its title in a line above; a block for each row where that is too wide."""
    from rich.table import Table as RichTable

    if table.title:
        say(table.title)
    rich = RichTable()
    for i, name in enumerate(table.columns):
        rich.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in table.rows:
        rich.add_row(*row)
    screen = console()
    if rich.__rich_measure__(screen, screen.options.update(max_width=10**6)).maximum > width():
        for line in _blocks(table):
            print(line)
    else:
        screen.print(rich)


def _blocks(table: Table) -> Iterator[str]:
    """Give the lines of a block for each row: its first cell, then a line for each other cell."""
    names = table.columns[1:]
    first = 4 + max(map(len, names))
    for row in table.rows:
        yield row[0]
        for name, cell in zip(names, row[1:], strict=True):
            # A list of numbers may end a line after each comma.
            words = re.split(r"(?<=,)|(?<= )", cell)
            line = f"  {name}".ljust(first)
            for word in words if cell else ():
                if len(line) + len(word.rstrip()) > width() and len(line) > first:
                    yield line.rstrip()
                    line = " " * first
                line += word
            if cell:
                yield line.rstrip()


def say(text: str) -> None:
    """Print `text` in lines that fit, which end between words."""
    whole = re.sub(r"(?<=\d) (?=%|ms\b|x\b)", "\0", text)  # a number stays with its unit
    lines = textwrap.fill(whole, width(), break_long_words=False, break_on_hyphens=False)
    print(lines.replace("\0", " "))


@contextmanager
def progress(doing: str, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Show `doing`, one or two words, while a block runs; give a function that adds its progress.

    On a terminal a line of standard error changes; elsewhere nothing is shown, or with `lines` a
    line after QUIET seconds, and one every BETWEEN seconds from then on.
    """
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True, markup=False).status(doing) as status:
            yield lambda far: status.update(f"{doing}: {far}")
        return
    now, done, begun = [doing], threading.Event(), time.monotonic()

    def show() -> None:
        wait = QUIET
        while not done.wait(wait):
            wait = BETWEEN
            with suppress(OSError, ValueError):  # a closed pipe gets nothing
                note(f"{now[0]} ({time.monotonic() - begun:.0f} s so far)")

    thread = threading.Thread(target=show, name="adaptra-progress", daemon=True)
    if lines:
        thread.start()
    try:
        yield lambda far: now.__setitem__(0, f"{doing}: {far}")
    finally:
        done.set()
        if lines:
            thread.join()


def try_stdout() -> None:
    """Check standard output before hours of work; raises BadFile if it cannot be written."""
    try:
        os.write(sys.stdout.fileno(), b"")
    except UnsupportedOperation:  # no descriptor: other code keeps what is printed
        return
    except (AttributeError, OSError) as error:  # AttributeError: it was closed at the start
        fault = f"it cannot be written: {getattr(error, 'strerror', 'it is closed')}"
        raise BadFile("standard output", "/dev/stdout", fault) from None


def note(text: str) -> None:
    """Print `text`, which is not part of the result, to standard error."""
    print(f"adaptra: {text}", file=sys.stderr)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Open a file that becomes `path` when the block ends; make the folders above it.

    Raises BadFile where that fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            yield partial
    except OSError as error:
        raise BadFile("--out", str(path), f"it cannot be written: {error.strerror}") from None


def write(path: Path, content: str) -> None:
    """Make a file that holds `content`. Raises BadFile where it cannot be written."""
    with writing(path) as file:
        file.write_text(content, encoding="utf-8")


def write_report(folder: Path, name: str, data: Any, html: str) -> list[Path]:
    """Write `data` to `name`.json and `html` to `name`.html; what was written.

    `folder`: of `results_folder`. Raises BadFile where a file cannot be written.
    """
    files = [folder / f"{name}.{kind}" for kind in ("json", "html")]
    write(files[0], json.dumps(data, indent=1, allow_nan=False) + "\n")
    write(files[1], html)
    return files


def finish(
    args: argparse.Namespace,
    folder: Path | None,
    name: str,
    data: Any,
    html: Callable[[], str],
    show: Callable[[], None],
) -> int:
    """Write the report `name` if there is a `folder`, then print; the exit status.

    With --json, of `args`, `data` is printed; else `show` prints it for people, and the files are
    named. `html` gives the page. Raises BadFile where a file cannot be written.
    """
    files = write_report(folder, name, data, html()) if folder else []
    if args.json:
        print_json(data)
        return 0
    show()
    for path in files:
        print(path)
    return 0


def ms(seconds: float) -> str:
    """`seconds` in milliseconds, with one digit after the point."""
    return f"{1e3 * seconds:.1f}"
