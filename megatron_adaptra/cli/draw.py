"""`adaptra draw`: a schedule as text, SVG, page or Chrome trace."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_adaptra.base.errors import BadFile, BadInput
from megatron_adaptra.base.files import results_folder
from megatron_adaptra.base.units import whole
from megatron_adaptra.cli.job import add_job, in_words, title_of
from megatron_adaptra.cli.output import print_json, progress, write
from megatron_adaptra.cli.planning import add_planning
from megatron_adaptra.cli.replicas.shares import shares_drawing, shares_json, wants_shares
from megatron_adaptra.cli.replicas.source import replica_plan_from
from megatron_adaptra.cli.source import add_source, plan_from, sourced
from megatron_adaptra.plan import Plan
from megatron_adaptra.plan.routes.reroute import ReplicaPlan
from megatron_adaptra.plan.routes.words import loads_in_words
from megatron_adaptra.view.ascii import LEAST_WIDTH, ascii_gantt, ascii_legend
from megatron_adaptra.view.chrome import chrome_trace
from megatron_adaptra.view.drawing import WIDTH, Drawing, drawing_html, drawing_svg
from megatron_adaptra.view.pipeline import pipeline_gantt

PICTURES = {"ascii": ".txt", "svg": ".svg", "html": ".html", "trace": ".trace.json"}
SUFFIX = {**PICTURES, "plan": ".plan"}  # the text form of what is drawn
_OF_SUFFIX = {"." + suffix.rpartition(".")[2]: kind for kind, suffix in SUFFIX.items()}
_EQUAL = {"forward_ms": 1.0, "backward_input_ms": 1.0, "backward_weight_ms": 1.0}
_NARROWEST, _WIDEST = 300, 20_000  # pixels
_TEXT_WIDTH = 120  # characters, where there is no terminal


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    formats = ",".join(SUFFIX)
    parser = subparsers.add_parser(
        "draw",
        help="a picture of a schedule: text, SVG, HTML or Chrome trace",
        description="Draw one iteration of a schedule as the simulator predicts it. Without --out, "
        "to the terminal. A trace opens in ui.perfetto.dev; a plan is the text form of what is "
        "drawn, for --schedule. A --schedule that comes with no times is drawn with all ops "
        "equally long.",
        allow_abbrev=False,
    )
    add_source(parser)
    parser.add_argument(
        "--format",
        metavar="F,...",
        help=f"some of {formats} (default: as the name of --out ends; else ascii, or all pictures "
        "for a folder)",
    )
    parser.add_argument("--out", metavar="PATH", help="a file, or a folder for several formats")
    parser.add_argument(
        "--width",
        type=whole,
        metavar="N",
        help="characters of ascii (default: the terminal), pixels of svg and html (default: 1160)",
    )
    parser.add_argument("--json", action="store_true", help="print times and messages as JSON")
    add_job(parser)
    add_planning(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw, to the terminal or to files; the exit status.

    Raises BadInput for values that do not go together.
    """
    out = args.out
    formats, in_folder = targets(args.format.split(",") if args.format else [], out)
    least = LEAST_WIDTH if formats == ["ascii"] else _NARROWEST
    if args.width is not None and not least <= args.width <= _WIDEST:
        allowed = f"it has to be from {least} to {_WIDEST}"
        raise BadInput("--width", args.width, allowed)
    with progress("planning", lines=True):
        drawn = _schedule(args)
    drawing = drawn.drawing
    files = _files(args, formats, in_folder, drawing.name) if out is not None else {}
    for kind, path in files.items():
        write(path, _text(drawn, kind, args.width))
    if args.json:
        print_json({**drawn.data, "files": {kind: str(path) for kind, path in files.items()}})
    elif out is None:
        print(_text(drawn, formats[0], args.width, to_file=False), end="")
    else:
        for path in files.values():
            print(path)
    return 0


class _Drawn(NamedTuple):
    """A picture, the text form of what it shows, and what --json prints of it."""

    drawing: Drawing
    text: str
    data: Mapping[str, Any]


def _schedule(args: argparse.Namespace) -> _Drawn:
    equal = _no_times(args)
    described, schedule = sourced(args, _EQUAL if equal else None)
    conditions, several = described.conditions, described.replicas
    if wants_shares(args, described):
        drawing, shares = shares_drawing(args, described)
        both = {one.name: one.to_json() for one in shares.timelines()}
        return _Drawn(drawing, shares.sync.text(), {**shares_json(shares), "timelines": both})
    plan: Plan | ReplicaPlan
    if several is None:
        plan = plan_from(args, described, schedule)
    else:
        plan = replica_plan_from(args, described, schedule)
    name, why = plan.schedule.policy or "schedule", plan.schedule.why
    if several is not None:
        why = loads_in_words(plan.schedule) or why
    job = ": ".join(filter(None, (title_of(args), in_words(conditions, several))))
    job += ", all ops equally long" * equal
    timeline = replace(plan.timeline, name=name)
    gantt = pipeline_gantt(timeline, timeline.makespan, several)
    drawing = Drawing(name, job, why, gantt, plan.lower_bound)
    data = {
        "policy": plan.schedule.policy,
        "why": why,
        "predicted_ms": 1e3 * plan.predicted,
        "lower_bound_ms": 1e3 * plan.lower_bound,
        "timeline": plan.timeline.to_json(),
    }
    return _Drawn(drawing, plan.schedule.text(), data)


def targets(formats: Sequence[str], out: str | None) -> tuple[list[str], bool]:
    """The formats to draw, and whether `out` is a folder for them.

    `formats`: what --format names, empty for what suits `out`. Raises BadInput.
    """
    for kind in formats:
        if kind not in SUFFIX:
            raise BadInput(
                "--format", kind, f"it has to be some of {', '.join(SUFFIX)}, with commas between"
            )
    chosen = list(formats)
    if out is None:
        if len(chosen) > 1:
            raise BadInput("--format", ",".join(chosen), "it needs --out, a file or a folder")
        return chosen or ["ascii"], False
    suffix = Path(out).suffix
    if Path(out).is_dir() or out.endswith(os.sep) or not suffix:
        return chosen or list(PICTURES), True
    if len(chosen) > 1:
        raise BadInput("--out", out, "it has to be a folder, for several formats")
    if not chosen and suffix not in _OF_SUFFIX:
        names = ", ".join(_OF_SUFFIX)
        raise BadInput(
            "--out", out, f"it has to be a folder, or a file whose name ends with one of {names}"
        )
    return chosen or [_OF_SUFFIX[suffix]], False


def _files(
    args: argparse.Namespace, formats: Sequence[str], in_folder: bool, policy: str
) -> dict[str, Path]:
    """Return the file of each format; raises BadFile if it is the schedule's or profile's."""
    if in_folder:
        folder = results_folder(Path(args.out))
        # The policy of a schedule that is read from a file may be any text.
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", policy).strip("-.")[:64] or "schedule"
        return {kind: folder / (name + SUFFIX[kind]) for kind in formats}
    out = Path(args.out)
    for flag in ("schedule", "profile"):
        given = getattr(args, flag)
        if given and out.exists() and Path(given).exists() and out.samefile(given):
            raise BadFile("--out", out, f"it is the file of --{flag}; name another one")
    return dict.fromkeys(formats, out)


def _no_times(args: argparse.Namespace) -> bool:
    """Return whether a schedule was given without times, so that only its order is known."""
    times = (key for key in vars(args) if key.startswith(("forward", "backward")))
    return bool(args.schedule and not args.profile) and all(vars(args)[k] is None for k in times)


def _text(drawn: _Drawn, kind: str, width: int | None, to_file: bool = True) -> str:
    drawing = drawn.drawing
    if kind == "plan":
        return drawn.text
    if kind == "svg":
        return drawing_svg(drawing, width or WIDTH)
    if kind == "html":
        return drawing_html(drawing, width or WIDTH)
    if kind == "trace":
        return json.dumps(chrome_trace({drawing.name: drawing.gantt}), allow_nan=False) + "\n"
    terminal = min(max(LEAST_WIDTH, shutil.get_terminal_size((_TEXT_WIDTH, 24)).columns), _WIDEST)
    rows = ascii_gantt(drawing.gantt, width or (_TEXT_WIDTH if to_file else terminal))
    return f"{drawing.job}\n{rows}\n{ascii_legend(drawing.gantt)}\n"
