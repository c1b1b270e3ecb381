"""Run a training script where UCC carries the pipeline's messages.

torch without UCC takes any backend of that name; this one is gloo.
"""

import runpy
import sys

import torch.distributed as dist

dist.Backend.register_backend(
    "ucc",
    lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
    devices=["cpu"],
)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
