"""Compiles the hostile driver, once for each state of its sources and each sanitizer."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = Path(__file__).parent / "csrc"
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC"]
FLAGS += ["-fvisibility=hidden"]
LINK = ["-shared", "-pthread", "-Wl,-soname,libcuda.so.1"]
COMPILING = 300  # seconds; against hanging


def missing() -> str:
    """Why it cannot be built here, or an empty string."""
    return "" if shutil.which(COMPILER) else f"no C++ compiler {COMPILER!r}"


def built(sanitizer: Sequence[str] = ()) -> Path:
    """The driver, with the soname of CUDA's; another process of pytest may be making it."""
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(repr((COMPILER, FLAGS, LINK, list(sanitizer))).encode())
    for path in (*sources, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "build" / "hostile" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda s: _object(s, folder, sanitizer), sources))
            made = folder / "new.so"
            _run([COMPILER, *LINK, *sanitizer, *map(str, objects), "-o", str(made)])
            made.rename(library)
    return library


def _object(source: Path, folder: Path, sanitizer: Sequence[str]) -> Path:
    made = folder / f"{source.stem}.o"
    _run([COMPILER, *FLAGS, *sanitizer, "-c", str(source), "-o", str(made)])
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILING)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
