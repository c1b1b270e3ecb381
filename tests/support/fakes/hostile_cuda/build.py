"""Compiles the hostile driver, once for each state of the sources; build/ keeps it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent
KEPT = ROOT / "build" / "hostile"
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC"]
FLAGS += ["-fvisibility=hidden"]
LINK = ["-shared", "-pthread", "-Wl,-soname,libcuda.so.1"]
COMPILING = 300  # seconds; against hanging


def missing() -> str:
    """Why it cannot be built here, or an empty string."""
    return "" if shutil.which(COMPILER) else f"no C++ compiler {COMPILER!r}"


def built() -> Path:
    """The driver, with the soname of CUDA's; another process of pytest may be making it."""
    sources = sorted((HERE / "csrc").iterdir())
    digest = hashlib.sha256(repr((COMPILER, FLAGS, LINK)).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    folder = KEPT / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "libcuda.so.1"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            new, code = folder / "new.so", [str(s) for s in sources if s.suffix == ".cpp"]
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda one: _object(one, folder), code))
            _run([COMPILER, *LINK, *objects, "-o", str(new)])
            new.rename(made)
    return made


def _object(source: str, folder: Path) -> str:
    made = folder / f"{Path(source).stem}.o"
    _run([COMPILER, *FLAGS, "-c", source, "-o", str(made)])
    return str(made)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILING)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
