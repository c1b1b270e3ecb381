"""`adaptra`: one command per module of this package, each imported only when it is used.

Exit status: 0 success, 2 bad input (one line that names the field, the value and what is allowed)
or something missing (the line says how to install it), 128 and the number of the signal that ended
a command, 1 anything else that went wrong on purpose.
Whatever a user can cause, a full disk or a closed standard output too, becomes such a line here.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO

from megatron_adaptra import __version__
from megatron_adaptra.base.errors import (
    AdaptraError,
    BadFile,
    BadInput,
    Interrupted,
    MissingPackage,
    UnsupportedMegatron,
    line_of,
    shown,
)
from megatron_adaptra.cli.old import renewed

# Each but `run` is a module here with `add_parser(subparsers)`, which sets `run`: (args) -> status.
COMMANDS = ("demo", "doctor", "run", "plan", "compare", "simulate", "draw", "bench", "netlab")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv`, or the command line, names; returns the exit status.

    argparse itself exits for --help and for misuse.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    named = next((word for word in words if not word.startswith("-")), None)
    if named == "run" and words[0] == "run":  # what follows belongs to torchrun and the script
        from megatron_adaptra.run import launch

        return launch(words[1:])
    try:
        _open_streams()
        try:
            status = _run(words, named)
        finally:  # after --help, too
            _flush()
        return status
    except BrokenPipeError:  # the reader, head say, has seen enough
        _give_up(sys.stdout)
        return 1
    except (BadInput, MissingPackage, UnsupportedMegatron) as error:
        return _fail(error, 2)
    except Interrupted as error:
        return _fail(error, 128 + error.signum)
    except AdaptraError as error:
        return _fail(error, 1)
    except OSError as error:  # what the system refuses: a name that is too long, a full disk
        where = shown(error.filename) if error.filename else "standard output"
        return _fail(f"{where}: {error.strerror or line_of(error)}", 2)
    except (MemoryError, RecursionError):
        return _fail("this is too large for the memory of this machine", 2)
    except KeyboardInterrupt:
        return 130


def _run(words: list[str], named: str | None) -> int:
    # What a command runs is not ours to parse.
    words, ran = _until(words, "--") if named == "netlab" else (words, [])
    for word in words:
        if not word or "\0" in word or any("\ud800" <= c <= "\udfff" for c in word):
            raise BadInput("arguments", word, "each is a text of at least one character, in UTF-8")
        if word == "--" or word.endswith("=--"):  # which argparse takes for no value
            raise BadInput("arguments", word, "-- stands only before the command of netlab run")
    # Help, and the message for a command that does not exist, need all of them.
    parser, parsers = _parser([named] if named in COMMANDS else COMMANDS)
    args, unknown = parser.parse_known_args(renewed(words) if named == "demo" else words)
    if unknown:
        from difflib import get_close_matches

        parser = parsers.get(named or "", parser)
        flags = re.findall(r"--[a-z][a-z-]+", parser.format_help())
        near = get_close_matches(unknown[0].partition("=")[0][:99], flags, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    args.command = ran
    return int(args.run(args))


def _open_streams() -> None:
    """Standard output takes every text, whatever the locale; BadInput where it is closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise BadInput("standard output", None, "it is closed; send it to /dev/null instead")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _give_up(sys.stdout)
        fault = f"it cannot be written: {error.strerror}"
        raise BadFile("standard output", "/dev/stdout", fault) from None


def _give_up(stream: TextIO) -> None:
    """Let nothing more go to a stream that takes nothing, at the end of the process neither."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _until(words: list[str], mark: str) -> tuple[list[str], list[str]]:
    at = words.index(mark) if mark in words else len(words)
    return words[:at], words[at + 1 :]


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, also where output cannot go; usage is for --help."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"adaptra: error: {line_of(message)} (see {self.prog} --help)\n")


def _parser(
    commands: Iterable[str],
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of `commands`, and by command its own."""
    parser = _Parser(
        prog="adaptra",
        description="Trains on with Megatron-LM while links, workers or replicas are slow: finds "
        "what is slow, plans schedules, routes of microbatches, all-reduces and shares of the "
        "batch for it, and shows what each would bring.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"adaptra {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in commands:
        if name == "run":  # main() hands its words on as they are
            about = "run a Megatron script with the plugin's --adaptra flags"
            subparsers.add_parser("run", help=about)
            continue
        import_module(f"megatron_adaptra.cli.{name}").add_parser(subparsers)
    return parser, subparsers.choices


def _fail(error: AdaptraError | str, status: int) -> int:
    """One line, whatever follows it in the message (the grid of a schedule, say)."""
    try:
        print(f"adaptra: error: {line_of(error)}", file=sys.stderr, flush=True)
    except OSError:  # nothing is printed, but the status is right
        _give_up(sys.stderr)
    return status
