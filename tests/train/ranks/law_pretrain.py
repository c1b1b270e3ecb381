"""pretrain_gpt_small.py, where each call of what adapts in Megatron's own program fails in turn.

LAW_CASES: pairs of a site and a kind, one for each iteration; without it the sites are looked for,
and printed at the end. What has failed is forgotten after its iteration.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from law import BESIDE, PACKAGE, Discovery, Fault, Site

from megatron_adaptra.adapter.pipeline.session import Session

SCRIPT = Path(__file__).with_name("pretrain_gpt_small.py")
BESIDES = tuple(PACKAGE + name for name in BESIDE)


class Turns:
    def __init__(self, cases: list[Any]) -> None:
        self._cases, self._iteration = iter(cases), -1
        self._stack, self._fault = contextlib.ExitStack(), None
        self.next()

    def next(self) -> None:
        """The fault before is over; the next one begins."""
        self._stack.close()
        if self._fault is not None:
            print(f"MET {self._fault.site} {self._fault.kind} {self._fault.hits}", flush=True)
        case = next(self._cases, None)
        self._fault = case and self._stack.enter_context(Fault(Site(*case[0]), case[1]))

    def at(self, session: Session) -> None:
        if session.iteration != self._iteration:
            self._iteration = session.iteration
            session.guard.flush(60.0)
            self.next()
            session.guard.off, session.guard._failures = False, itertools.count()


def follow(turns: Turns) -> None:
    forward_backward = Session.forward_backward

    def in_turn(session: Session, *args: Any) -> Any:
        turns.at(session)
        return forward_backward(session, *args)

    Session.forward_backward = in_turn  # type: ignore[method-assign]


def look() -> None:
    seen = Discovery()
    seen.__enter__()

    def report() -> None:
        seen.__exit__()
        sites = [[s.caller, s.callee] for s in seen.calls if s.callee.startswith(BESIDES)]
        print("SITES " + json.dumps(sorted(sites)), flush=True)

    atexit.register(report)


if cases := os.environ.get("LAW_CASES"):
    follow(Turns(json.loads(cases)))
else:
    look()
sys.argv[0] = str(SCRIPT)
runpy.run_path(str(SCRIPT), run_name="__main__")
