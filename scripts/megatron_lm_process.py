"""What scripts/megatron_lm_matrix.py runs outside itself: trainings, a compiler, and digests.

As a command, `CHECKOUT FOLDER...`: print SHA-256 of each file of every checkpoint of format torch,
over all tensors and numbers of its models and optimizers, as one JSON object per folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the plugin need not be installed

from megatron_adaptra.base.processes import started  # noqa: E402

DIGESTS = str(Path(__file__).resolve())  # this file as a command


def environment(python: str, scratch: Path) -> dict[str, str]:
    """For a training with that Python, whose temporary files go into `scratch`.

    Megatron compiles its helpers at start and asks `python3` and `python3-config` on PATH how. A
    virtual environment has no python3-config, and pyenv's chooses a Python by the folder.
    """
    ask = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    suffix = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    tools, temporary = scratch / "bin", scratch / "tmp"
    for folder in (tools, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    config = tools / "python3-config"
    config.write_text(
        f"""#!/bin/sh
[ "$*" = --extension-suffix ] && exec echo {suffix.strip()}
echo "python3-config $*: only --extension-suffix is known here" >&2
exit 1
"""
    )
    config.chmod(0o755)
    path = [str(tools), str(Path(python).parent), os.environ.get("PATH", os.defpath)]
    more = {"PATH": os.pathsep.join(path), "TMPDIR": str(temporary)}
    return {**ENVIRONMENT, **more}


def build_helpers(checkout: Path, environment: Mapping[str, str], scratch: Path) -> str:
    """As Megatron does at its start; why it failed, or nothing. Git ignores what it builds."""
    log = scratch / "make.log"
    command = ["make", "-C", str(checkout / "megatron/core/datasets")]
    status = execute(command, log, scratch, 300, environment)
    return "" if status == 0 else f"make ended with {status}: {why(log.read_text())}"


def why(text: str) -> str:
    """The first error in a log: the later ones follow from it."""
    lines = [line for line in _COLOR.sub("", text).splitlines() if line.strip()]
    return next(filter(_ERROR.search, lines), (lines or ["it printed nothing"])[-1]).strip()[:300]


_COLOR = re.compile(r"\x1b\[[\d;]*[mK]")
# Of Python, of argparse and of compilers; after the prefix with which torch marks a rank.
_ERROR = re.compile(
    r"^(\[rank\d+\]: ?)?[\w.]*(?<!ChildFailed)(Error|Exception|Lost)\b"
    r"|^\S+ (fatal )?error: |^adaptra: error|^terminate called|^Fatal Python error"
)

# The caller's PYTHONPATH might lead to another Megatron.
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}  # fmt: skip


def execute_in_netlab(
    command: Sequence[str],
    log: Path,
    ranks: int,
    rule: str,
    timeout: float,
    environment: Mapping[str, str],
) -> int | str:
    """Run one rank on each host of a laboratory (`adaptra netlab`) with that slow link."""
    from megatron_adaptra.base.errors import AdaptraError
    from megatron_adaptra.emulate.scenario import load_rules
    from megatron_adaptra.netlab.lab import Lab

    with log.open("wb") as out:
        try:
            with Lab(ranks, load_rules([rule], ranks, network=True)) as lab:
                statuses = lab.run(command, environment, lambda _, line: _write(out, line), timeout)
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
    with (
        log.open("wb") as out,
        started(
            command, 5.0, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            cwd=folder, env=environment,
        ) as process,
    ):  # fmt: skip
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"a timeout after {timeout:g} s"


def digests(checkout: str, *folders: str) -> list[dict[str, str]]:
    """By the file's name. With data parallelism only the first replica is saved, by Megatron."""
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()
    sys.path.insert(0, checkout)  # the files hold objects of Megatron's classes
    import megatron.core

    # Else another Megatron than the checkout's was tried.
    assert Path(megatron.core.__file__).resolve().is_relative_to(Path(checkout).resolve())
    return [
        {str(path.relative_to(x)): _digest(path) for path in sorted(Path(x).glob("iter_*/**/*.pt"))}
        for x in folders
    ]


def _digest(path: Path) -> str:
    import torch

    state = torch.load(path, map_location="cpu", weights_only=False)
    parts = state
    if path.name != "distrib_optim.pt":  # which has nothing but the distributed optimizer's shards
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
