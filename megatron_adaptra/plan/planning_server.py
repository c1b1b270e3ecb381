"""A planner in a process of its own beside a training: one line of JSON after another.

Its side of adapt/planning_process.py. A request has a `number`, which its answer has, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_adaptra.base.processes import die_with_parent

NICE = 10  # the training comes first where cores are short
Answer = Callable[[dict[str, Any]], dict[str, Any]]  # of a request


def serve(answer: Answer) -> None:
    """Answer all requests, until the input ends; the process ends with its parent, too.

    `answer`: to a request. What it raises is answered with `{"error": text}`.
    """
    die_with_parent()
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):  # of which nice changes nothing
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(NICE)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_answered(answer, request)), flush=True)


def _answered(answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    number = request.pop("number")
    try:
        return answer(request) | {"number": number}
    except Exception as error:  # the process that has asked logs it
        return {"error": f"{type(error).__name__}: {error}", "number": number}
