"""A body of a test in a process of its own, over a shared library that stands in for hardware."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import processes
from patience import PATIENCE, TooLate, too_late

from megatron_adaptra.transport.engine import bindings

ROOT = Path(__file__).parents[3]
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]


def compiled(source: Path, name: str, *flags: str, reads: Sequence[Path] = ()) -> Path:
    """The library of that `name`, compiled once for each state of its sources.

    `reads`: the files that `source` includes, as far as they may change.
    """
    if why := bindings.missing():
        pytest.skip(why)
    if not shutil.which(COMPILER):
        pytest.skip(f"no C++ compiler {COMPILER!r}")
    command = [COMPILER, *FLAGS, *flags, f"-Wl,-soname,{name}"]
    texts = b"".join(file.read_bytes() for file in (source, *reads))
    key = hashlib.sha256(texts + repr(command).encode()).hexdigest()[:16]
    made = ROOT / "build" / "libraries_of_tests" / key / name
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            part = Path(folder) / "part"
            subprocess.run([*command, str(source), "-o", str(part)], check=True, timeout=PATIENCE)
            part.rename(made)
    return made


def run_over(
    file: Path, control: Callable[[ctypes.CDLL], Any], body: Callable[..., Any], args: Any
) -> Any:
    """What `body(control(library), *args)` returned in a process of its own, or raises its error.

    The engine opens the library of `file` there, by its name, instead of the machine's.
    """
    mine, theirs = processes().Pipe(duplex=False)
    target = processes().Process(
        target=_process, args=(theirs, file, control, body, args), daemon=True
    )
    target.start()
    theirs.close()
    try:
        assert mine.poll(PATIENCE), f"{body.__name__} has reported nothing for {PATIENCE:g} s"
        try:
            word, value = mine.recv()
        except EOFError:
            target.join(PATIENCE)
            raise AssertionError(f"{body.__name__} ended with {target.exitcode}") from None
    finally:
        target.kill()
        target.join(PATIENCE)
    if word == "late":
        raise TooLate(value)
    assert word == "returned", value
    return value


def _process(
    pipe: Any,
    file: Path,
    control: Callable[[ctypes.CDLL], Any],
    body: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        library = ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
        pipe.send(("returned", body(control(library), *args)))
    except BaseException as error:
        pipe.send(("late" if too_late(error) else "raised", traceback.format_exc()))
    pipe.close()
    os._exit(0)
