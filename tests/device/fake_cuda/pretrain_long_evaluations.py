"""pretrain_changing_links.py, whose evaluations take FAKE_EVALUATION_S more seconds per rank."""

from __future__ import annotations

import functools
import os
import runpy
import threading
from pathlib import Path
from typing import Any

from megatron.training import training

SCRIPT = Path(__file__).with_name("pretrain_changing_links.py")
evaluate = training.evaluate


@functools.wraps(evaluate)
def long(*args: Any, **kwargs: Any) -> Any:
    threading.Event().wait(float(os.environ["FAKE_EVALUATION_S"]))
    return evaluate(*args, **kwargs)


training.evaluate = long
runpy.run_path(str(SCRIPT), run_name="__main__")
