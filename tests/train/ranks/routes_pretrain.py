"""pretrain_gpt_small.py under the routes in ROUTES, from the first iteration to the last.

They are taken as those of a checkpoint would be, or are those of one where ROUTES is empty; what is
measured changes nothing.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from megatron_adaptra.adapt.routes.remedy import RouteRemedy
from megatron_adaptra.adapter.entry import checkpoint
from megatron_adaptra.adapter.pipeline.session import Session

SCRIPT = Path(__file__).with_name("pretrain_gpt_small.py")


def resume(session: Session) -> None:
    session.resumed = {"format": 1, "schedule": os.environ["ROUTES"], "delays": {}}


def on_reports(*_: Any) -> None:
    pass


if os.environ["ROUTES"]:
    checkpoint.resume = resume
RouteRemedy.observe = on_reports  # type: ignore[method-assign]
sys.argv[0] = str(SCRIPT)
runpy.run_path(str(SCRIPT), run_name="__main__")
