"""Make the pictures of docs/img anew: `python benchmarks/pictures.py [NAME ...] [--demo FOLDER]`.

Without a name: the computed ones. MEASURED pictures are made by name, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gantt_png import draw_gantt, draw_legend, save, write_header

from megatron_adaptra.base.package import command
from megatron_adaptra.ir.op import Op
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.view import gain
from megatron_adaptra.view.pipeline import pipeline_gantt

ROOT = Path(__file__).resolve().parents[1]
ROW, BETWEEN, HEAD = 0.3, 0.55, 1.75  # inches
MEASURED = ("timelines", "planner-benchmark", "whole-iteration")
# The commands of each picture, in an empty folder; the last one writes the file of that name.
COMMANDS = {
    "allreduce-winners": ("benchmarks/allreduce.py --out .", "allreduce.png"),
    "planner-benchmark": ("benchmarks/planner.py --large --out .", "planner.png"),
    "planner-compare": (
        "adaptra compare --profile {root}/benchmarks/published/pipemorph_profiles.json"
        " --name increasing-delay-14B-6_7-60ms --out . && benchmarks/tradeoff.py . tradeoff.png",
        "tradeoff.png",
    ),
    "planner-reproduce": ("benchmarks/reproduce.py --out .", "reproduce.png"),
    "replicas": (
        "adaptra draw --stages 4 --microbatches 6 --forward-ms 9 --backward-ms 18 --replicas 3"
        " --slow 1.2:dead --slow 0.1:2x --activation-budget 6 --out replicas.svg",
        "replicas.svg",
    ),
    "shares": (
        "adaptra draw --stages 2 --microbatches 6 --forward-ms 10 --backward-ms 20 --replicas 3"
        " --slow 2:2x --set optimizer_ms=12 --out shares.svg",
        "shares.svg",
    ),
    "timelines": ("adaptra demo --out .", "timelines.png"),
    "whole-iteration": (
        "benchmarks/whole_iteration.py --iterations 24 --plot whole-iteration.png",
        "whole-iteration.png",
    ),
}


def main() -> None:
    """Raises ImportError where matplotlib is not installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(COMMANDS)}")
    parser.add_argument("--demo", type=Path, help="results of `adaptra demo`, for timelines")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/img", help="default: docs/img")
    args = parser.parse_args()
    if unknown := sorted({*args.names} - {*COMMANDS}):
        parser.error(f"no such picture: {', '.join(unknown)}; there are {', '.join(COMMANDS)}")
    for name in args.names or [name for name in COMMANDS if name not in MEASURED]:
        words, file = COMMANDS[name]
        with TemporaryDirectory() as folder:
            todo = "" if args.demo and name == "timelines" else words
            for one in filter(None, todo.split(" && ")):
                program, *rest = shlex.split(one.format(root=ROOT))
                script = [sys.executable, str(ROOT / program)]
                start = command("megatron_adaptra") if program == "adaptra" else script
                subprocess.run([*start, *rest], cwd=folder, check=True)
            picture = Path(folder, file)
            if name == "timelines":
                timelines(args.demo or Path(folder), picture)
            shutil.move(picture, args.out / f"{name}{picture.suffix}")


def timelines(folder: Path, png: Path) -> None:
    """Draw the timelines that a demo has left in `folder`."""
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
    config, result = summary["config"], gain.in_words(gain.key_times(summary["times"], "slow"))
    words = f"{config['stages']} stages × {config['microbatches']} microbatches"
    lead = f"{words}, {config['iterations']} iterations; slow: {', '.join(config['slow_links'])}"

    def draw(figure: Any, height: float) -> None:
        write_header(figure, height, f"{result} while a link is slow", lead)
        top = height - HEAD
        draw_legend(figure, list(gantts.values()), seconds, (top + 0.25) / height)
        for name, gantt in gantts.items():
            top -= tall[name]
            axes = figure.add_axes((0.07, top / height, 0.90, tall[name] / height))
            draw_gantt(axes, gantt, seconds)
            axes.set_title(name.capitalize(), loc="left", fontsize=10, fontweight="bold", pad=5)
            top -= BETWEEN

    save(png, HEAD + sum(tall.values()) + BETWEEN * len(tall), draw)


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
    main()
