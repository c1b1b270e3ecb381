"""pretrain_changing_links.py, where a driver pins no more memory from some iteration on.

FAKE_UNPINNABLE_FROM: the file that it reads, the rank, and the iteration: "FILE|1|5".
"""

import os
import runpy
from pathlib import Path

from megatron_adaptra.adapter.pipeline.session import Session

path, rank, first = os.environ["FAKE_UNPINNABLE_FROM"].split("|")
forward_backward = Session.forward_backward


def unpinnable(session, *args):
    if session.iteration == int(first) and os.environ["RANK"] == rank:
        Path(path).write_text(f"{rank}\n")
    return forward_backward(session, *args)


Session.forward_backward = unpinnable
runpy.run_path(str(Path(__file__).with_name("pretrain_changing_links.py")), run_name="__main__")
