"""Output of commands: JSON, tables as wide as their cells, and files."""

from __future__ import annotations

import argparse
import json
import os
import sys
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
_WIDE = 1000  # characters; a pipe or a file has no edge that a table would have to be cut at


def print_json(data: Any) -> None:
    """Print `data` as one object; ValueError for NaN and Infinity, which are not JSON."""
    print(json.dumps(data, allow_nan=False))


def console() -> Console:
    """Standard output, without colours for numbers or markup in texts."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    return Console(highlight=False, markup=False, width=width)


def show_table(table: Table) -> None:
    """Print it, with its title in a line above."""
    from rich.table import Table as RichTable

    if table.title:
        say(table.title)
    rich = RichTable()
    for i, name in enumerate(table.columns):
        rich.add_column(name, justify="right" if i else "left")
    for row in table.rows:
        rich.add_row(*row)
    console().print(rich)


def say(text: str) -> None:
    """Print `text`, whole lines of any length."""
    console().print(text, soft_wrap=True)


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
        say(str(path))
    return 0


def ms(seconds: float) -> str:
    """`seconds` in milliseconds, with one digit after the point."""
    return f"{1e3 * seconds:.1f}"
