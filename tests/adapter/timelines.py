"""The timelines that the demo has drawn, as a viewer of traces gets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def drawn(out: Path, process: str) -> dict[str, list[dict[str, Any]]]:
    """The bars of a process in timeline.json: by the name of the row, in the order of time."""
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    mine = [event for event in events if event["pid"] == pids[process]]
    rows = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
    bars = sorted((e for e in mine if e["ph"] == "X"), key=lambda e: (e["ts"], e["name"]))
    return {row: [bar for bar in bars if bar["tid"] == tid] for tid, row in sorted(rows.items())}
