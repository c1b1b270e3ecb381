"""A function in a process of its own, which ends with what the function has changed."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from forks import processes
from patience import PATIENCE, TooLate, too_late


class Failed(AssertionError):
    """What the function raised there, in words; or how its process ended."""


def apart(function: Callable[..., Any], *args: Any, seconds: float = PATIENCE) -> Any:
    """What `function(*args)` returns; it is found by its name in its module."""
    with tempfile.NamedTemporaryFile() as errors:
        return _apart(errors, function, args, seconds)


def _apart(errors: Any, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> Any:
    ours, theirs = processes().Pipe(duplex=False)
    process = processes().Process(
        target=_process, args=(theirs, errors.name, function, args), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise Failed(f"{function.__name__}{args}: nothing after {seconds:g} s")
        try:
            good, late, result = ours.recv()
        except EOFError:
            process.join(seconds)
            end = errors.read()[-4000:].decode(errors="replace")
            what = f"{function.__name__}{args}"
            raise Failed(f"{what}: exit status {process.exitcode}: {end}") from None
        if not good:
            raise (TooLate if late else Failed)(result)
        return result
    finally:
        if process.is_alive():
            process.join(0 if sys.exc_info()[0] else 10)  # it has answered, and ends
        process.kill()
        process.join()
        ours.close()


def _process(pipe: Any, errors: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    try:
        pipe.send((True, False, function(*args)))
    except BaseException as error:
        pipe.send((False, too_late(error), traceback.format_exc()))
