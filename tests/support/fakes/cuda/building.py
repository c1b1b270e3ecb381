"""Compiles the fake CUDA and NCCL for the torch of this Python, once, into a cache of the user's.

Needs a C++ compiler (CXX says which) and nm, and nothing of CUDA's toolkit.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("libraries")
NET_ABI = SOURCES.parents[1] / "slow_net/net_abi.h"
FLAGS = ("-std=c++17", "-O1", "-g1", "-fPIC", "-pthread")
DRIVER, RUNTIME, NVML = "libcuda.so.1", "libfakecudart.so", "libnvidia-ml.so.1"
OF_RUNTIME = ("runtime_", "cublas", "nccl_")
KEPT = 8  # builds of other versions, in the cache
# What torch takes from CUDA's libraries; of these, what the fake does not answer becomes a stub.
FAMILIES = ("cuda", "__cuda", "nccl", "cublas")
STUB = {
    "cublas": "int {name}() {{ return 0; }}",  # as if done: nothing is computed anyway
    "nccl": 'int {name}() {{ return unanswered("{name}", 5); }}',
    "cuda": 'int {name}() {{ return unanswered("{name}", 801); }}',
}
STUBS_BEGIN = """\
#include "options.hpp"
static int unanswered(const char* name, int error) {
  fake_cuda::say("%s is not supported", name);
  return error;
}
extern "C" {
"""


class CannotBuild(RuntimeError):
    """The machine lacks what it takes; the text says what."""


@functools.cache
def torch_folder() -> Path | None:
    """The folder of torch's libraries, if it is a build for CUDA. Does not import torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "lib"
    return folder if (folder / "libtorch_cuda.so").exists() else None


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "adaptra-fake-cuda"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"adaptra-fake-cuda-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    for program in (name.split()[0], "nm"):
        if shutil.which(program) is None:
            text = f"the fake CUDA needs a C++ compiler and nm; there is no {program}"
            raise CannotBuild(text)
    return name


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise CannotBuild(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def _digest(torch: Path | None) -> str:
    found = hashlib.sha256(" ".join((compiler(), *FLAGS)).encode())
    for path in (Path(__file__), NET_ABI, *sorted(SOURCES.iterdir())):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for library in sorted(torch.glob("*cuda*.so")) if torch else ():
        state = library.stat()
        found.update(f"{library} {state.st_size} {state.st_mtime_ns}".encode())
    return found.hexdigest()[:24]


def _symbols(option: str, *libraries: Path) -> set[str]:
    lines = _run("nm", "-D", option, *map(str, libraries)).splitlines()
    names = {line.split()[-1].partition("@")[0] for line in lines if line.strip()}
    return {name for name in names if name.startswith(FAMILIES)}


def _stubs(torch: Path, made: list[Path], into: Path) -> Path:
    have = {line.split()[-1] for line in _run("nm", "-g", *map(str, made)).splitlines() if line}
    missing = sorted(_symbols("--undefined-only", *torch.glob("*.so")) - have)
    lines = []
    for name in missing:
        family = next((key for key in STUB if name.startswith(key)), "cuda")
        lines.append(STUB[family].format(name=name))
    source = into / "stubs.cpp"
    source.write_text(STUBS_BEGIN + "\n".join(lines) + "\n}\n")
    return source


def _compile(source: Path, into: Path) -> Path:
    made = into / (source.stem + ".o")
    included = (f"-I{SOURCES}", f"-I{NET_ABI.parent}")
    _run(*compiler().split(), *FLAGS, *included, "-c", str(source), "-o", str(made))
    return made


def _link(into: Path, name: str, objects: list[Path], *more: str) -> None:
    shared = ("-shared", "-pthread", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN")
    words = (*shared, "-o", str(into / name), *map(str, objects), *more)
    _run(*compiler().split(), *words, "-ldl")


def _build(torch: Path | None, into: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        sources = sorted(SOURCES.glob("*.cpp"))
        made = dict(zip(sources, pool.map(lambda s: _compile(s, into), sources), strict=True))
    runtime = [o for s, o in made.items() if s.name.startswith(OF_RUNTIME)]
    driver = [o for s, o in made.items() if o not in runtime and s.name != "nvml.cpp"]
    _link(into, DRIVER, driver)
    if torch is not None:
        runtime.append(_compile(_stubs(torch, runtime, into), into))
    _link(into, RUNTIME, runtime, str(into / DRIVER))
    _link(into, NVML, [made[SOURCES / "nvml.cpp"]], str(into / DRIVER))
    for path in into.glob("*.o"):
        path.unlink()


def _remove_old(folder: Path) -> None:
    builds = [path for path in folder.iterdir() if path.is_dir()]
    for path in sorted(builds, key=lambda p: p.stat().st_mtime, reverse=True)[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def build() -> Path:
    """The folder with the fake's libraries, built if need be. One process builds, others wait."""
    torch = torch_folder()
    wanted = cache() / _digest(torch)
    if wanted.is_dir():
        os.utime(wanted)
        return wanted
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the kernel, however its holder ends
        if not wanted.is_dir():
            half = Path(tempfile.mkdtemp(prefix="half-", dir=cache()))
            try:
                _build(torch, half)
                half.rename(wanted)
            finally:
                shutil.rmtree(half, ignore_errors=True)
            _remove_old(cache())
    return wanted
