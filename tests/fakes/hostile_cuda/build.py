"""Compiles the hostile driver, and an engine whose waits can be taken away.

Once for each state of the sources and each sanitizer; build/ keeps them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
ENGINE = ROOT / "csrc" / "rdma_offload"
KEPT = ROOT / "build" / "hostile"
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
    made = _Made(sorted((HERE / "csrc").glob("*.cpp")), [*FLAGS, *sanitizer], LINK)
    return made.file("libcuda.so.1")


def built_engine(sanitizer: Sequence[str] = ()) -> Path:
    """The engine's module for this Python, of whose waits a test can take each away."""
    sources = [*sorted(ENGINE.rglob("*.cpp")), HERE / "engine" / "removed.cpp"]
    python, suffix = sysconfig.get_paths()["include"], sysconfig.get_config_var("EXT_SUFFIX")
    includes = [f"-I{ENGINE}", f"-I{python}", f"-I{pybind11.get_include()}"]
    flags = [flag for flag in FLAGS if flag != "-Werror"]  # of headers that are not ours, too
    made = _Made(
        sources, [*flags, *includes, "-DTEST_REMOVED_WAITS", *sanitizer], ["-shared", "-pthread"]
    )
    return made.file(f"_native{suffix}")


class _Made:
    """What is made of `sources` and the headers beside them, with what compiler and linker take."""

    def __init__(self, sources: Sequence[Path], flags: list[str], link: list[str]) -> None:
        self._sources, self._flags, self._link = sources, flags, link
        headers = sorted({h for source in sources for h in source.parent.glob("*.h")})
        self._digest = hashlib.sha256(repr((COMPILER, flags, link)).encode())
        for header in headers:
            self._digest.update(header.name.encode() + header.read_bytes())

    def file(self, name: str) -> Path:
        """Called `name`, in a folder of its own."""
        digest = self._digest.copy()
        for source in self._sources:
            digest.update(source.name.encode() + source.read_bytes())
        folder = KEPT / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / name).exists():
                with ThreadPoolExecutor(2) as pool:
                    objects = list(pool.map(self._object, self._sources))
                made = folder / "new.so"
                run = [COMPILER, *self._link, *self._flags, *map(str, objects), "-o", str(made)]
                _run(run)
                made.rename(folder / name)
        return folder / name

    def _object(self, source: Path) -> Path:
        """Kept as long as it, all headers and flags are the same."""
        digest = self._digest.copy()
        digest.update(source.read_bytes())
        made = KEPT / "objects" / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        made.parent.mkdir(exist_ok=True)
        if not made.exists():
            new = made.with_suffix(f".{os.getpid()}")
            _run([COMPILER, *self._flags, "-c", str(source), "-o", str(new)])
            new.rename(made)
        return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILING)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
