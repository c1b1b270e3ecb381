"""Trainings by Megatron's own program over the fake machine, in forks of a zygote."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.cuda import building, machine
from patience import PATIENCE
from zygote import Zygote

from scripts.megatron_lm_rows import FLAGS, LINE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SCRIPT = ROOT / "tests" / "train" / "ranks" / "pretrain_gpt_small.py"
# Kernels compute nothing: no loss is a number to be checked.
ON_GPUS = (
    "--distributed-backend", "nccl", "--no-check-for-nan-in-loss-and-grad",
    "--rerun-mode", "disabled",
)  # fmt: skip
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1")
GRAPHS = (  # of whole iterations
    *CHUNKS, "--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration",
    "--cuda-graph-warmup-steps", "1", "--te-rng-tracker", "--clip-grad", "0",
)  # fmt: skip
LAYER_GRAPHS = (  # of single layers
    "--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "1", "--te-rng-tracker",
)  # fmt: skip
REPORTS = re.compile(r"^fake CUDA, .*", re.MULTILINE)  # stalls, calls without an answer, misuse


def _reason() -> str:
    if building.torch_folder() is None:
        return "the installed torch has no CUDA build, which the fake CUDA is for"
    found = importlib.util.find_spec("megatron")
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    if not any((Path(folder) / "training" / "training.py").is_file() for folder in folders):
        return "the installed megatron-core has no megatron.training: wheels of 0.17 or newer have"
    return ""


needs_torch_for_gpus = pytest.mark.skipif(bool(_reason()), reason=_reason())


@dataclass(frozen=True)
class Trained:
    status: int
    text: str

    @property
    def milliseconds(self) -> list[float]:
        """Of each iteration."""
        found = map(LINE.search, self.text.splitlines())
        return [float(match[2]) for match in found if match]

    @property
    def complaints(self) -> list[str]:
        """What the fake has reported."""
        return REPORTS.findall(self.text)


@functools.cache
def _zygote(plugin: bool) -> Zygote:
    # By NVML torch sees the devices without a call of CUDA, after which nothing may fork.
    environment = {**machine.environment({}), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    made = Zygote(plugin, environment)
    atexit.register(made.end)
    return made


def words(pipeline: int, *flags: str, iterations: int, script: Path = SCRIPT) -> list[str]:
    return [
        str(script), *FLAGS, *ON_GPUS, "--num-layers", "4", "--global-batch-size", "12",
        "--pipeline-model-parallel-size", str(pipeline), "--train-iters", str(iterations), *flags,
    ]  # fmt: skip


def train(
    folder: Path, *flags: str, pipeline: int = 2, ranks: int = 0, iterations: int = 4,
    timeout: float = PATIENCE, script: Path = SCRIPT, variables: Mapping[str, str] | None = None,
    **options: Any,
) -> Trained:  # fmt: skip
    """A training of `ranks` (one per stage) that may fail; options as those of machine.py.

    With a trace each iteration has a mark in it.
    """
    if "trace" in options:
        script = HERE / "marked_pretrain.py"
    # Nothing is reported where a rank has waited for another one's core alone.
    given = {"kernel-us": "20", "stall-s": str(PATIENCE / 4)}
    given |= {key.replace("_", "-"): str(value) for key, value in options.items()}
    done = _zygote("--adaptra" in flags).run(
        folder, words(pipeline, *flags, iterations=iterations, script=script),
        ranks=ranks or pipeline, timeout=timeout,
        environment={**machine.variables(given), **(variables or {})},
    )  # fmt: skip
    return Trained(done.status, done.text)
