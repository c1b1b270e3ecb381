"""`adaptra demo`: a GPT trains in two arms while a link gets slow and heals again."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_adaptra.config import ENGINES
from megatron_adaptra.demo.options import PRECISIONS, DemoOptions
from megatron_adaptra.errors import BadInput
from megatron_adaptra.units import parse_seconds

_DEFAULTS = DemoOptions()


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a real GPT in two arms, stock and adaptra, while a link gets slow",
        description="Train a real GPT of megatron-core on this machine, in two arms that alternate "
        "iteration by iteration: stock Megatron, and Megatron with adaptra. A link gets slow and "
        "heals again. Losses and parameters have to be equal to the last bit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    d = _DEFAULTS
    add("--stages", type=int, default=d.stages, metavar="N", help="pipeline stages, one rank each")
    add("--microbatches", type=int, default=d.microbatches, metavar="N", help="per iteration")
    add("--data-parallel", type=int, default=1, metavar="N", help="replicas of the pipeline")
    add("--layers", type=int, default=argparse.SUPPRESS, metavar="N", help="(default: one a stage)")
    add("--hidden", type=int, default=d.hidden, metavar="N", help="hidden size")
    add("--seq-length", type=int, default=d.seq_length, metavar="N", help="tokens per sequence")
    add("--iterations", type=int, default=d.iterations, metavar="N", help="per arm")
    add(
        "--slow-link",
        action="append",
        default=argparse.SUPPRESS,
        metavar="A-B",
        help="link that gets slow, e.g. 2-3 (both ways) or 2>3 (one way); repeat it or separate "
        "several by commas (default: the last link)",
    )
    add("--delay", default="40ms", metavar="TIME", help="what a message takes longer, e.g. 40ms")
    add(
        "--from-iteration",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="first slow iteration (default: a third of the run)",
    )
    add(
        "--to-iteration",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="first iteration after it (default: two thirds of the run)",
    )
    add(
        "--engine",
        choices=ENGINES,
        default=d.engine,
        help="native: Megatron's own schedule; executor: our loop over ops",
    )
    add("--precision", choices=PRECISIONS, default=d.precision, help="of the model")
    add("--dropout", type=float, default=d.dropout, metavar="P", help="hidden and attention")
    add(
        "--activation-budget",
        type=float,
        default=argparse.SUPPRESS,
        metavar="N",
        help="microbatches in flight that a stage may hold (default: no limit)",
    )
    add("--seed", type=int, default=d.seed, metavar="N", help="of model, data order and dropout")
    add(
        "--text",
        default="",
        metavar="PATH",
        help="file or folder to train on (default: the Python standard library's source)",
    )
    add("--out", default=d.out, metavar="DIR", help="where results go")
    add("--timeout", default="25s", metavar="TIME", help="wait for a message before giving up")
    add("--json", action="store_true", help="print the summary as JSON on standard output")
    add("--no-emulation", action="store_true", help="no emulated link; the network itself is slow")
    add(
        "--rank-from-env",
        action="store_true",
        help="be one rank, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them",
    )
    parser.set_defaults(run=run)


def options_of(args: argparse.Namespace) -> DemoOptions:
    """The checked options; raises BadInput."""
    given = vars(args)
    links = [part for text in given.get("slow_link", []) for part in text.split(",")]
    same = (
        "stages",
        "microbatches",
        "data_parallel",
        "layers",
        "hidden",
        "seq_length",
        "iterations",
        "from_iteration",
        "to_iteration",
        "engine",
        "precision",
        "dropout",
        "activation_budget",
        "seed",
        "text",
        "out",
    )
    return DemoOptions(
        **{name: given[name] for name in same if name in given},
        slow_links=links,
        delay=parse_seconds(args.delay, "--delay"),
        timeout=parse_seconds(args.timeout, "--timeout"),
        emulate=not args.no_emulation,
    )


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    from megatron_adaptra.demo.launch import launch, require_megatron

    require_megatron()
    if args.rank_from_env:
        return _one_rank(options)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting the ranks", total=options.iterations, now="")

        def on_progress(step: dict[str, Any]) -> None:
            phase = next(n for n, (_, end) in options.phases.items() if step["iteration"] < end)
            now = "  ".join(f"{arm} {ms:.0f} ms" for arm, ms in step["ms"].items())
            warmup = ",".join(map(str, step["warmup"]))
            progress.update(
                task, advance=1, description=f"{phase:9}", now=f"{now}  warmup {warmup}"
            )
            if not console.is_terminal and step["iteration"] % 8 == 7:
                console.print(f"iteration {step['iteration'] + 1}: {phase}, {now}, warmup {warmup}")

        summary = launch(options, on_progress)
    if args.json:
        print(json.dumps(summary))
    else:
        show(summary, options, Console())
    return 0


def _one_rank(options: DemoOptions) -> int:
    """One rank among others that somebody else starts (torchrun, Slurm, a network laboratory)."""
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise BadInput("environment", missing[0], "--rank-from-env needs it, as torchrun sets it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron_adaptra.demo.worker import run_rank

    status = run_rank(options.dump())
    if status == 0 and os.environ["RANK"] == "0":
        with open(f"{options.out}/summary.json") as file:
            show(json.load(file), options, Console())
    return status


def show(summary: dict[str, Any], options: DemoOptions, console: Console) -> None:
    """The closing table and the words to it."""
    stock, ours = summary["arms"]["stock"], summary["arms"]["adaptra"]
    table = Table(title="Iteration time, median ms")
    for name in ("phase", "stock", "adaptra", "stock / adaptra"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in stock["phases"]:
        a, b = (arm["phases"][phase]["iteration_ms"] for arm in (stock, ours))
        table.add_row(phase, f"{a:.0f}", f"{b:.0f}", f"{a / b:.2f} x")
    table.add_section()
    table.add_row(
        "predicted, slow link", *(f"{arm['predicted_slow_ms']:.0f}" for arm in (stock, ours)), ""
    )
    table.add_row(
        "peak in flight",
        *(",".join(f"{x:g}" for x in arm["peak_in_flight"] or []) for arm in (stock, ours)),
        "",
    )
    console.print(table)
    for replan in summary["replans"]:
        measured = replan["measured_ms"]
        console.print(
            f"replan at iteration {replan['iteration']}: {replan['why']} "
            f"(predicted {replan['predicted_ms']:.0f} ms, measured "
            + (f"{measured:.0f} ms)" if measured is not None else "nothing)"),
            highlight=False,
        )
    if not summary["replans"]:
        console.print("no replan: no change was worth one")
    overhead = summary["overhead_healthy"]
    if overhead is not None:
        console.print(
            f"healthy iterations: adaptra takes {overhead:.3f} x of stock", highlight=False
        )
    for what in ("losses", "parameters"):
        same = summary[f"{what}_identical"]
        console.print(f"{what}: " + ("identical to the last bit" if same else "[red]DIFFERENT[/]"))
    console.print(f"results: {options.out}/report.html, timeline.json, decisions.jsonl")
    sys.stdout.flush()
