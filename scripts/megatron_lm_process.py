"""What scripts/megatron_lm_matrix.py runs outside itself: trainings, a compiler, and digests.

As a command, `CHECKOUT FOLDER...`: print SHA-256 of each file of every checkpoint of format torch,
over all tensors and numbers of its models and optimizers, as one JSON object per folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = str(Path(__file__).resolve())  # this file as a command


def build_helpers(checkout: Path, python: str) -> None:
    """Megatron's own `make` takes the suffix of whatever python3-config is; ours is the right one.

    The file is ignored by git. Nothing happens if it is there.
    """
    ask = "import sysconfig, pybind11; print(sysconfig.get_config_var('EXT_SUFFIX'), " \
        "sysconfig.get_path('include'), pybind11.get_include())"  # fmt: skip
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    suffix, *includes = said.split()
    folder = checkout / "megatron/core/datasets"
    if not (folder / f"helpers_cpp{suffix}").exists():
        with tempfile.TemporaryDirectory() as scratch:
            built = Path(scratch) / "helpers_cpp.so"
            command = [
                "g++",
                "-O3",
                "-shared",
                "-std=c++17",
                "-fPIC",
                *(f"-I{x}" for x in includes),
            ]
            subprocess.run([*command, "helpers.cpp", "-o", built], cwd=folder, check=True)
            shutil.move(built, folder / f"helpers_cpp{suffix}")


# The caller's PYTHONPATH might lead to another Megatron.
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}  # fmt: skip


def execute_in_netlab(
    command: Sequence[str], log: Path, ranks: int, rule: str, timeout: float
) -> int | str:
    """Run one rank on each host of a laboratory (`adaptra netlab`) with that slow link."""
    from megatron_adaptra.errors import AdaptraError
    from megatron_adaptra.netlab.lab import Lab
    from megatron_adaptra.transport.scenario import load_rules

    with log.open("wb") as out:
        try:
            with Lab(ranks, load_rules([rule], ranks, network=True)) as lab:
                statuses = lab.run(command, ENVIRONMENT, lambda _, line: _write(out, line), timeout)
        except AdaptraError as error:
            return str(error)
    return next((status for status in statuses if status), 0)


def _write(out: BinaryIO, line: bytes) -> None:
    out.write(line + b"\n")


def execute(
    command: Sequence[str],
    log: Path,
    folder: Path,
    timeout: float,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> int | str:
    """Run to its end or to the timeout, and leave none of its processes behind."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=folder,
            env=environment, start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"a timeout after {timeout:g} s"
        finally:
            _end_descendants(process)


def _die_with_parent() -> None:
    if sys.platform == "linux":  # PR_SET_PDEATHSIG; torchrun passes SIGTERM on to its ranks
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _end_descendants(process: subprocess.Popen[bytes]) -> None:
    """torchrun puts every rank into a session of its own: a process group is not enough."""
    process.poll()
    for signum, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience
        for one in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signum)
        while _descendants() and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)  # an orphan's end is no event for us
    process.wait()


def _descendants() -> list[int]:
    """Living processes below this one. As a subreaper it inherits its descendants' orphans."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def become_subreaper() -> None:
    """Inherit the orphans of our descendants: a rank whose torchrun is gone is still ours."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def digests(checkout: str, *folders: str) -> list[dict[str, str]]:
    """By the file's name. With data parallelism only the first replica is saved, by Megatron."""
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()
    sys.path.insert(0, checkout)  # the files hold objects of Megatron's classes
    import megatron.core

    # Else another Megatron than the checkout's was tried.
    assert Path(megatron.core.__file__).is_relative_to(Path(checkout).resolve())
    return [
        {str(path.relative_to(x)): _digest(path) for path in sorted(Path(x).glob("iter_*/**/*.pt"))}
        for x in folders
    ]


def _digest(path: Path) -> str:
    import torch

    state = torch.load(path, map_location="cpu", weights_only=False)
    parts = {k: v for k, v in state.items() if k.startswith(("model", "optimizer"))}
    assert "optimizer" in parts, f"{path}: no optimizer state"
    assert len(parts) > 1, f"{path}: no model"
    digest = hashlib.sha256()
    _add(digest, parts, "")
    return digest.hexdigest()


def _add(digest: Any, value: Any, name: str) -> None:
    import torch

    if isinstance(value, dict):
        for key in sorted(value, key=str):
            _add(digest, value[key], f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _add(digest, item, f"{name}/{index}")
    elif isinstance(value, torch.Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (int, float, str, bool)):
        digest.update(f"{name} {value!r}".encode())


if __name__ == "__main__":
    print(json.dumps(digests(*sys.argv[1:])))
