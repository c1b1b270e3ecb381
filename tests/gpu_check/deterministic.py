"""The same bits every time, on a GPU too; the rest is CUBLAS_WORKSPACE_CONFIG."""

from __future__ import annotations

import torch


def deterministic() -> None:
    """Where an operation has no deterministic kernel torch warns. New tensors stay unfilled: that
    changes no result, and would cost a kernel each.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
