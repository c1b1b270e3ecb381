"""Where the check runs: on GPUs, over the fake machine of fakes/cuda, or on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.cuda import building
from fakes.cuda import machine as fake_machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = ROOT / "tests"
PATHS = (
    ROOT,
    ROOT / "scripts",
    TESTS / "support",
    TESTS / "train/ranks",
    TESTS / "network",
)  # whose fakes and cases the parts take
GPU, FAKE, CPU = "gpu", "fake", "cpu"
ASK = """
import json, platform, sys, torch
there = torch.cuda.is_available()
count = torch.cuda.device_count() if there else 0
try:
    from importlib.metadata import version
    core = version("megatron-core")
except Exception:
    core = "none"
print(json.dumps({
    "count": count, "name": torch.cuda.get_device_name(0) if there else "",
    "torch": torch.__version__, "cuda": torch.version.cuda or "", "core": core,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if there else "",
    "python": platform.python_version(),
}))
"""
# Of torchrun: one machine, whose name need not have an address.
ALONE = ("--standalone", "--local-addr", "127.0.0.1")
ASKING = 120.0  # seconds to import torch on a busy machine


class NoTarget(RuntimeError):
    """There is nothing to run the check on; the text says what to do."""


@dataclass(frozen=True)
class Target:
    """`gpus`: how many there are; 0 on the CPU. `versions`: as ASK prints them."""

    kind: str
    gpus: int
    versions: Mapping[str, Any]

    @property
    def text(self) -> str:
        """For the head of the results."""
        v = self.versions
        what = {
            GPU: f"{self.gpus} x {v['name']}",
            FAKE: f"rehearsal over a fake machine, {self.gpus} x GPU, kernels compute nothing",
            CPU: "rehearsal on the CPU",
        }[self.kind]
        cuda = f", CUDA {v['cuda']}" if v["cuda"] else ""
        nccl = f", NCCL {v['nccl']}" if self.kind == GPU and v["nccl"] else ""
        return (
            f"{what}; torch {v['torch']}{cuda}{nccl}, megatron-core {v['core']}, "
            f"Python {v['python']}, {os.cpu_count()} CPU cores"
        )

    def environment(self, **machine: object) -> dict[str, str]:
        """Of a rank. `machine`: the fake one's options; `queues` is for a real one, too."""
        return _environment(self.kind, self.gpus, machine)

    def gpu_of(self, rank: int) -> int:
        """As torch counts them; ranks share one where there are too few."""
        return rank % self.gpus if self.gpus else 0

    def nccl(self, ranks: int) -> bool:
        """Whether so many ranks can have NCCL between them: it refuses two on one GPU."""
        return self.gpus >= ranks


def find(rehearse: bool, gpus: int | None) -> Target:
    """The GPUs that there are, at most `gpus`, or what a rehearsal runs on. Raises NoTarget."""
    if not rehearse:
        found = _ask(GPU, 0)
        if not found["count"]:
            raise NoTarget(
                f"torch {found['torch']} finds no CUDA GPU here; --rehearse runs the same parts "
                "over a fake machine, or on the CPU"
            )
        if gpus is not None and gpus > found["count"]:
            raise NoTarget(f"--gpus {gpus}: there are {found['count']}")
        return Target(GPU, gpus or found["count"], found)
    count = 2 if gpus is None else gpus
    if _fake_runs():
        return Target(FAKE, count, _ask(FAKE, count))
    return Target(CPU, 0, _ask(CPU, 0))


def _fake_runs() -> bool:
    return building.torch_folder() is not None


def _environment(kind: str, gpus: int, machine: Mapping[str, object]) -> dict[str, str]:
    path = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
    found = {
        **os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS gives the same bits every time with it
        "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    if "queues" in machine:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = str(machine["queues"])
    if kind == CPU:
        found["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == FAKE:
        given = {key.replace("_", "-"): str(value) for key, value in machine.items()}
        try:
            found = fake_machine.environment({"devices": str(gpus), **given}, found)
        except building.CannotBuild as error:
            raise NoTarget(str(error)) from error
    return found


def _ask(kind: str, gpus: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=_environment(kind, gpus, {}), capture_output=True,
        text=True, timeout=ASKING, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise NoTarget(f"torch cannot be used here: {lines[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
