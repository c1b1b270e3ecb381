"""Engine, device layer and hostile driver under the sanitizers, in whole pipelines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.hostile_cuda import build
from hostile_cuda.jobs import EXECUTOR, NATIVE

pytestmark = pytest.mark.large

PROGRAM = Path(__file__).with_name("sanitized.py")
SUPPRESSIONS = Path(build.__file__).with_name("tsan.supp")
# Runtime libraries of the compiler, flags, and options.
SANITIZERS = {
    "thread": (
        ["tsan"],
        ["-fsanitize=thread"],
        {"TSAN_OPTIONS": f"halt_on_error=1 exitcode=66 suppressions={SUPPRESSIONS}"},
    ),
    "memory": (
        ["asan", "ubsan"],
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},  # Python's own
    ),
}
JOBS, RUNNING = 40, 3000  # seconds; against hanging, the first time with the compiler's


@pytest.mark.large
@pytest.mark.cold
@pytest.mark.timeout(2 * RUNNING)
@pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "-")
@pytest.mark.parametrize("order", [NATIVE, EXECUTOR])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_pipelines(sanitizer: str, stages: int, chunks: int, order: str) -> None:
    names, flags, settings = SANITIZERS[sanitizer]
    build.built(flags)  # before the runtime is loaded into everything, the compiler included
    build.built_engine(flags)
    command = [sys.executable, "-W", "ignore", str(PROGRAM), " ".join(flags), str(JOBS)]
    command += [str(stages), str(chunks), order]
    runtimes = [_file(f"lib{name}.so") for name in names]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RUNNING,
        env={**os.environ, **settings, "LD_PRELOAD": " ".join(runtimes)},
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout}{done.stderr[-8000:]}"


def _file(library: str) -> str:
    """Where the compiler has it."""
    command = [build.COMPILER, f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
