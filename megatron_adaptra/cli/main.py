"""`adaptra`: one command per module of this package, each imported only when it is used.

Exit status: 0 success, 2 bad input (one line that names the field, the value and what is allowed)
or something missing (the line says how to install it), 1 anything else that went wrong on purpose.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from megatron_adaptra import __version__
from megatron_adaptra.errors import AdaptraError, BadInput, MissingPackage, UnsupportedMegatron

# Each is a module here with `add_parser(subparsers)`, which sets `run`: (args) -> exit status.
COMMANDS = ("plan", "compare", "simulate", "draw", "demo", "netlab", "run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv`, or the command line, names; returns the exit status.

    argparse itself exits for --help and for misuse.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    named = next((word for word in words if not word.startswith("-")), None)
    if named == "run" and words[0] == "run":  # what follows belongs to torchrun and the script
        from megatron_adaptra.run import launch

        return launch(words[1:])
    # What a command runs is not ours to parse.
    words, ran = _until(words, "--") if named == "netlab" else (words, [])
    # Help, and the message for a command that does not exist, need all of them.
    parser = _parser([named] if named in COMMANDS else COMMANDS)
    args = parser.parse_args(words)
    args.command = ran
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BadInput, MissingPackage, UnsupportedMegatron) as error:
        return _fail(error, 2)
    except AdaptraError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _until(words: list[str], mark: str) -> tuple[list[str], list[str]]:
    at = words.index(mark) if mark in words else len(words)
    return words[:at], words[at + 1 :]


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong; the usage is for --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"adaptra: error: {message} (see {self.prog} --help)\n")


def _parser(commands: Iterable[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="adaptra",
        description="Pipeline schedules that adapt to slow links.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"adaptra {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in commands:
        import_module(f"megatron_adaptra.cli.{name}").add_parser(subparsers)
    return parser


def _fail(error: AdaptraError, status: int) -> int:
    """One line, whatever follows it in the message (the grid of a schedule, say)."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    print(f"adaptra: error: {line}", file=sys.stderr)
    return status
