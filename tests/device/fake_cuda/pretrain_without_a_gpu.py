"""The training script of the tests, on whose rank 1 the plugin cannot open the GPU."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron_adaptra.base.errors import DeviceFailed
from megatron_adaptra.device import gpu_bindings

SCRIPT = Path(__file__).resolve().parents[2] / "train" / "ranks" / "pretrain_gpt_small.py"


def refuse(ordinal: int) -> None:
    raise DeviceFailed(f"GPU {ordinal} is not for us")


if os.environ["RANK"] == "1":
    gpu_bindings.open_device = refuse
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT), run_name="__main__")
