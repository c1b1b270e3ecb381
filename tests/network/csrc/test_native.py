"""The engine's own C++ programs, under the sanitizers: races, memory, leaks, undefined behaviour.

Objects are kept beyond the checkout, one set for each sanitizer, and compiled again where a source,
a header or the compiler has changed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import random
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENGINE, TESTS = ROOT / "csrc" / "rdma_offload", Path(__file__).parent
COMPILER = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
FLAGS += ["-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "memory": ["-fsanitize=address,undefined,float-cast-overflow"],
}
SETTINGS = {"UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}
UNUSED = 14 * 24 * 3600  # seconds after which an object is removed
COMPILING, RUNNING = 300, 550  # seconds; against hanging, nothing is measured with them

# What it runs, how often (seeds or frames) by default and with --full.
PROGRAMS = [
    ("memory", "test_peer", 50, 10000),
    ("memory", "test_engine", 2, 100),
    ("memory", "test_limits", None, None),
    ("memory", "test_device", 3, 200),
    ("memory", "fuzz_wire", 75_000, 10_000_000),
    ("memory", "fuzz_ring", 25_000, 3_000_000),
    ("thread", "test_engine", 4, 30),
    pytest.param("thread", "test_device", 5, 100, marks=pytest.mark.large),
    pytest.param("thread", "fuzz_ring", 50_000, 1_000_000, marks=pytest.mark.large),
]
DRIVER = ROOT / "tests/support/fakes" / "controlled_cuda" / "libcuda.cpp"  # that test_device links


@functools.cache
def everything_included() -> bytes:
    """What any object may depend on, beside its own source."""
    headers = sorted((*ENGINE.rglob("*.h"), *TESTS.glob("*.h")))
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    return version + repr((FLAGS, SANITIZERS)).encode() + b"".join(h.read_bytes() for h in headers)


def compiled(sanitizer: str, source: Path) -> Path:
    """The object of `source`; another process, also of another checkout, may be making it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "adaptra-tests" / sanitizer
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(everything_included() + source.read_bytes()).hexdigest()[:24]
    made, part = folder / f"{source.stem}.{key}.o", folder / f"{source.stem}.part"
    with open(folder / f"{source.stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            anywhere = f"-ffile-prefix-map={ROOT}=."
            flags = [*FLAGS, *SANITIZERS[sanitizer], f"-I{ENGINE}", anywhere]
            run([COMPILER, *flags, "-c", str(source), "-o", str(part)])
            part.replace(made)
        made.touch()
        for other in folder.glob(f"{source.stem}.*.o"):
            if other.stat().st_mtime < time.time() - UNUSED:
                other.unlink()
    return made


def driver(sanitizer: str, folder: Path) -> Path:
    """A driver of CUDA, as the engine looks for one."""
    made = folder / "libcuda.so.1"
    flags = [*FLAGS, *SANITIZERS[sanitizer], "-fPIC", "-shared", f"-Wl,-soname,{made.name}"]
    run([COMPILER, *flags, str(DRIVER), "-o", str(made)])
    return made


def run(command: list[str], timeout: float = COMPILING) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **SETTINGS}
    )
    output = f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"status {done.returncode}: {output}"
    return output


@pytest.mark.cold
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"no C++ compiler {COMPILER!r}")
@pytest.mark.parametrize(("sanitizer", "program", "few", "many"), PROGRAMS)
def test_clean(
    sanitizer: str,
    program: str,
    few: int | None,
    many: int | None,
    pytestconfig: pytest.Config,
    tmp_path: Path,
) -> None:
    sources = [path for path in ENGINE.rglob("*.cpp") if path.parent.name != "bindings"]
    with ThreadPoolExecutor(2) as pool:
        objects = pool.map(
            functools.partial(compiled, sanitizer), [*sources, TESTS / f"{program}.cpp"]
        )
        made = tmp_path / program
        command = [COMPILER, "-pthread", *SANITIZERS[sanitizer], *map(str, objects)]
        if program == "test_device":
            command += [str(driver(sanitizer, tmp_path)), f"-Wl,-rpath,{tmp_path}"]
        run([*command, "-o", str(made)])
    count = many if pytestconfig.getoption("--full") else few
    seed = random.randrange(1, 2**31)
    print(run([str(made), *([] if count is None else [str(seed), str(count)])], RUNNING))


@pytest.mark.cold
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"no C++ compiler {COMPILER!r}")
def test_the_binary_interface_of_the_cuda_driver_is_the_headers() -> None:
    found = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
    if not found:
        pytest.skip("no header of the CUDA driver: install a CUDA toolkit")
    for header in found:
        where = [f"-I{ENGINE}", f"-I{header.parent}"]
        run([COMPILER, "-std=c++17", "-fsyntax-only", *where, str(TESTS / "test_cuda_abi.cpp")])


@pytest.mark.cold
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"no C++ compiler {COMPILER!r}")
def test_the_binary_interface_of_libibverbs_is_the_headers() -> None:
    if not Path("/usr/include/infiniband/verbs.h").is_file():
        pytest.skip("no header of libibverbs: install libibverbs-dev")
    run([COMPILER, "-std=c++17", "-fsyntax-only", f"-I{ENGINE}", str(TESTS / "test_verbs_abi.cpp")])
