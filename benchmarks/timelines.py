"""A demo's timelines as a PNG, as in README: `python benchmarks/timelines.py adaptra-demo PNG`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_adaptra.ir.op import Op
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.view.pipeline import pipeline_gantt
from megatron_adaptra.view.png import draw_gantt, draw_legend, save, write_header

ROW, BETWEEN, HEAD, FOOT = 0.3, 0.55, 1.6, 0.35  # inches


def main(folder: str, png: str) -> None:
    """Raises ImportError where matplotlib is not installed."""
    trace = json.loads(Path(folder, "timeline.json").read_text())["traceEvents"]
    summary = json.loads(Path(folder, "summary.json").read_text())
    gantts = {
        event["args"]["name"]: pipeline_gantt(
            timeline([e for e in trace if e["pid"] == event["pid"]])
        )
        for event in trace
        if event["name"] == "process_name"
    }
    seconds = 1.04 * max(gantt.makespan for gantt in gantts.values())
    tall = {name: ROW * gantt.rows for name, gantt in gantts.items()}
    config, times = summary["config"], summary["speedup_slow"]
    words = f"{config['stages']} stages × {config['microbatches']} microbatches"
    lead = f"{words}, {config['iterations']} iterations; slow: {', '.join(config['slow_links'])}"

    def draw(figure: Any, height: float) -> None:
        write_header(figure, height, f"{times:.2f}× as fast while a link is slow", lead)
        top = height - HEAD
        draw_legend(figure, list(gantts.values()), seconds, top / height)
        for name, gantt in gantts.items():
            top -= tall[name]
            axes = figure.add_axes((0.07, top / height, 0.90, tall[name] / height))
            draw_gantt(axes, gantt, seconds)
            axes.set_title(name.capitalize(), loc="left", fontsize=10, fontweight="bold", pad=5)
            top -= BETWEEN

    save(png, HEAD + sum(tall.values()) + BETWEEN * len(tall) + FOOT, draw)


def timeline(events: list[dict[str, Any]]) -> Timeline:
    """Read a process of the trace: the ops of one pipeline's stages, and its messages."""
    spans = [
        Span(e["tid"] - 1, Op.parse(e["name"]), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    ]
    arrived = {e["id"]: e["ts"] / 1e6 for e in events if e["ph"] == "e" and e["cat"] == "link"}
    messages = []
    for e in events:
        if e["ph"] == "b" and e["cat"] == "link":
            source, target = map(int, e["name"].removeprefix("link ").split(" to "))
            op = Op.parse(e["args"]["op"])
            messages.append(Message(source, target, op, e["ts"] / 1e6, arrived[e["id"]]))
    return Timeline(tuple(spans), tuple(messages))


if __name__ == "__main__":
    main(*sys.argv[1:])
