"""One rank of part `equality`: train/ranks/schedules_script.py, as it is, on a GPU or the CPU.

FILE with cases, FOLDER, number of GPUs, whether a fault is planted, whether there are no numerics.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from gpu_check import without_numerics
from gpu_check.deterministic import deterministic
from gpu_check.target import ROOT

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

from gpu_check.host_staged import host_staged  # noqa: E402


class OnDevice:
    """A dataset whose samples are where the model is."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._dataset[index]
        return {name: torch.as_tensor(value, device="cuda") for name, value in sample.items()}


@contextlib.contextmanager
def data_on_device(spoil: bool) -> Iterator[None]:
    """`spoil`: as a planted fault, what is trained under a schedule of ours sees other samples."""
    from megatron_adaptra.adapter.baseline import gpt
    from megatron_adaptra.adapter.compat.patch_attr import patch_attr

    build, batches = gpt.build_dataset, gpt._Batches

    def other(arm: Any, home: int) -> Any:
        from megatron_adaptra.adapter.entry.activate import _active

        arm.consumed += 1 if _active else 0
        return batches(arm, home)

    with contextlib.ExitStack() as stack:
        stack.callback(patch_attr(gpt, "build_dataset", lambda *args: OnDevice(build(*args))))
        if spoil:
            stack.callback(patch_attr(gpt, "_Batches", other))
        yield


def main(cases: str, folder: str, gpus: str, spoil: str, fake: str) -> None:
    deterministic()
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % int(gpus))
    kernel = "fused_weight_gradient_mlp_cuda"  # has to be there before Megatron is imported
    if importlib.util.find_spec(kernel):
        importlib.import_module(kernel)
    else:
        importlib.import_module("fakes.fused_kernel").install()
    script = ROOT / "tests/train/ranks/schedules_script.py"
    sys.argv = [str(script), cases, folder]
    sys.path.insert(0, str(script.parent))
    with host_staged(everything=not ON_GPU), data_on_device(spoil == "1"):
        if fake == "1":
            without_numerics.allow()
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
