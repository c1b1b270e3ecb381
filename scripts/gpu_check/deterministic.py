"""The same bits every time, on a GPU too; the rest is CUBLAS_WORKSPACE_CONFIG."""

from __future__ import annotations

import re
import warnings

import torch

WORDS = "does not have a deterministic implementation"  # as torch words it


def deterministic() -> None:
    """Where an operation has no deterministic kernel torch warns. New tensors stay unfilled: that
    changes no result, and would cost a kernel each.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    warnings.filterwarnings("default", f".*{WORDS}")
    torch.backends.cudnn.benchmark = False


def without(text: str) -> set[str]:
    """Which operations have no such kernel, of what a rank printed."""
    return set(re.findall(rf"(\S+) {WORDS}", text))
