"""The training script of the tests, with a mark in the fake's trace before each iteration."""

from __future__ import annotations

import ctypes
import runpy
import sys
from pathlib import Path
from typing import Any

from megatron.training import training

SCRIPT = Path(__file__).resolve().parents[2] / "train" / "ranks" / "pretrain_gpt_small.py"

if __name__ == "__main__":
    mark = ctypes.CDLL(None).fakeCudaMark
    step = training.train_step

    def marked(*words: Any, **named: Any) -> Any:
        mark(b"iteration")
        return step(*words, **named)

    training.train_step = marked
    sys.path[0] = str(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
