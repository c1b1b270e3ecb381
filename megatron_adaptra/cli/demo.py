"""`adaptra demo`: a GPT trains twice, as stock and with adaptra, while a link gets slow."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from dataclasses import fields
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_adaptra.base.errors import BadInput, line_of
from megatron_adaptra.base.units import brief, number, whole
from megatron_adaptra.cli.demo_table import show
from megatron_adaptra.cli.output import note
from megatron_adaptra.cli.profile import conditions_of, load_profile
from megatron_adaptra.cli.slow_job import rules_of
from megatron_adaptra.config import POLICIES, REROUTES
from megatron_adaptra.demo.options import (
    DEMO_ENGINES,
    DROPOUT,
    ENVIRONMENT,
    PRECISIONS,
    DemoOptions,
)
from megatron_adaptra.run import check_rank
from megatron_adaptra.transport.engine.bindings import missing
from megatron_adaptra.view.summary import Summary

_Flag = tuple[Any, str | None, str]  # its type, list, bool or choices; its value; its help
_D = DemoOptions()
# Keys of a job's profile that a training takes; it measures what the others say.
_OF_JOB = (
    "stages", "microbatches", "replicas", "chunks", "recompute", "activation_budget", "slow",
)  # fmt: skip
_MODEL: dict[str, _Flag] = {
    "--profile": (str, "FILE", "the job of adaptra plan, as YAML or JSON; flags win over it"),
    "--stages": (whole, "N", f"pipeline stages, one rank each (default: {_D.stages})"),
    "--microbatches": (whole, "N", f"microbatches per iteration (default: {_D.microbatches})"),
    "--replicas": (whole, "N", f"data-parallel replicas (default: {_D.data_parallel})"),
    "--hidden-size": (whole, "N", f"hidden size (default: {_D.hidden_size})"),
    "--seq-length": (whole, "N", f"tokens per sequence (default: {_D.seq_length})"),
    "--iterations": (whole, "N", f"iterations, of each of the two (default: {_D.iterations})"),
    "--seed": (whole, "N", f"seed of model, data order and dropout (default: {_D.seed})"),
    "--num-layers": (whole, "N", "transformer layers (default: one per chunk)"),
    "--precision": (PRECISIONS, None, f"number format of the model (default: {_D.precision})"),
    "--dropout": (
        number,
        "P",
        f"hidden and attention dropout (default: {DROPOUT}, but 0 with --reroute auto and "
        "slow replicas: where microbatches move dropout falls on other values than in stock)",
    ),
    "--text": (
        str,
        "PATH",
        "file or folder to train on (default: the Python standard library's source)",
    ),
}
_LINKS: dict[str, _Flag] = {
    "--slow": (
        list,
        "RULE[@A..B]",
        "what gets slow, in iterations A up to B (default: the second third of the run); may be "
        "repeated (default: 40ms on the last link). 2-3:40ms a link, both ways (2>3: one way), "
        "2-3:10MB/s what it carries, 0.1-1.2:40ms a path between workers (replica.stage), 1.2:2x a "
        "worker, or a scenario YAML. For replicas: 2:2x a whole one (--adaptra-sync share "
        "gives it fewer microbatches), 2:30ms one that comes late to its gradients "
        "(--adaptra-allreduce auto finds it). With --netlab: 1.2:20MB/s the port of a worker's "
        "host, all:5MB/s each one",
    ),
    "--netlab": (
        bool,
        None,
        "one host per rank, joined by really slow links (see adaptra netlab); needs root",
    ),
    "--no-emulation": (bool, None, "emulate nothing slow, because the network itself is slow"),
}
_RUN: dict[str, _Flag] = {
    "--engine": (
        DEMO_ENGINES,
        None,
        "native: Megatron's own schedule; executor: our loop over ops (default: native, or "
        "executor where policy, chunks, recompute or --reroute auto need it)",
    ),
    "--reroute": (
        REROUTES,
        None,
        "plan all replicas together. swap: they exchange partners round slow paths. auto: single "
        "microbatches move round slow workers, too. off: each by itself. (default: off; with "
        "several replicas auto for a slow worker, and for a slow path swap, or auto with --engine "
        "executor)",
    ),
    "--policy": (
        POLICIES,
        None,
        "adaptive: a plan for the links as they are; the others are fixed schedules "
        "(default: adaptive)",
    ),
    "--chunks": (
        whole,
        "N",
        "model chunks per stage, for interleaved schedules (default: 2 for policy "
        "interleaved, else 1)",
    ),
    "--recompute": (
        bool,
        None,
        "forwards may be recomputed instead of keeping their activations",
    ),
    "--activation-budget": (
        str,
        "N",
        "what a stage may hold of activations: microbatches (12), bytes (20MiB), or auto, "
        "what the device has left (default: no limit)",
    ),
    "--config": (
        str,
        "FILE",
        "YAML file with further settings of the plugin, e.g. min_gain",
    ),
    "--timeout": (
        number,
        "SECONDS",
        "how long a rank waits for a message before it gives up (default: 25)",
    ),
    "--out": (str, "DIR", f"where results go (default: {_D.out})"),
    "--json": (bool, None, "print the summary as JSON"),
    "--rank-from-env": (
        bool,
        None,
        "be one rank; RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set as torchrun does",
    ),
}


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "demo",
        help="train a real GPT twice, with stock Megatron and with adaptra, while a link gets slow",
        description="Train a real GPT of megatron-core on this machine twice, in turns, iteration "
        "by iteration: with stock Megatron, and with adaptra. A link gets slow and recovers. "
        "Losses and parameters have to be equal to the last bit. Interrupted, it reports what it "
        "has by then.",
        usage="%(prog)s [flags]",
        allow_abbrev=False,
    )
    for title, flags in (
        ("what is trained", _MODEL),
        ("what gets slow, and when", _LINKS),
        ("how it runs", _RUN),
    ):
        group = parser.add_argument_group(title)
        for flag, (kind, metavar, words) in flags.items():
            add = partial(group.add_argument, flag, help=words)
            if kind is bool:
                add(action="store_true")
            elif kind is list:
                add(action="append", default=[], metavar=metavar)
            elif isinstance(kind, tuple):
                add(choices=kind)
            else:
                add(type=kind, metavar=metavar)
    parser.set_defaults(run=run)


def _options_of(args: argparse.Namespace) -> DemoOptions:
    """The checked options; raises BadInput."""
    _refuse_contradictions(args)
    if args.profile:
        _take_job(args)
    given = {
        one.name: value
        for one in fields(DemoOptions)
        if (value := vars(args).get(one.name)) is not None
    }
    given["data_parallel"] = args.replicas or _D.data_parallel
    return DemoOptions(**given, emulate=not args.no_emulation)


def _take_job(args: argparse.Namespace) -> None:
    """Set what no flag says from the job in `--profile`; raises BadFile or BadInput."""
    job = load_profile(args.profile)
    conditions_of(job)  # refused where `adaptra plan` refuses it
    taken = {key: job[key] for key in _OF_JOB if key in job} | {"slow": rules_of(job)}
    if "activation_budget" in job:
        taken["activation_budget"] = str(job["activation_budget"])
    flags = vars(args)
    flags.update({key: flags[key] or value for key, value in taken.items()})
    if measured := [key for key in job if key not in _OF_JOB]:
        note(f"measured in a training, not taken from {args.profile}: {', '.join(measured)}")


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise BadInput for the first flag that another one leaves without effect."""
    for flag, other, why in (
        ("--no-emulation", "--slow", "with which nothing is made slow"),
        ("--no-emulation", "--netlab", "for the laboratory makes links slow"),
        ("--rank-from-env", "--netlab", "for the laboratory starts the ranks itself"),
    ):
        values = [vars(args)[one[2:].replace("-", "_")] for one in (other, flag)]
        if all(values):
            value = ",".join(values[0]) if other == "--slow" else values[0]
            raise BadInput(other, value, f"it has no place beside {flag}, {why}")


def run(args: argparse.Namespace) -> int:
    """Train, show the progress and the closing table; the exit status."""
    options = _options_of(args)
    from megatron_adaptra.demo.launch import launch, prepare, require_megatron

    require_megatron()
    if args.rank_from_env:
        return _one_rank(args, options)
    out = prepare(options)  # refused before anything is shown
    if why := missing():  # of the ranks' output the user sees only why they ended
        note(f"messages go over gloo, for there is no engine: {why}")
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    terminal = console.is_terminal
    # Drawing takes a core from the ranks, so not often.
    with Progress(
        *columns, console=console, refresh_per_second=2, disable=not terminal
    ) as progress:
        task = progress.add_task("starting the ranks", total=options.iterations, now="")

        def on_progress(step: dict[str, Any]) -> None:
            phase = next(n for n, (_, end) in options.phases.items() if step["iteration"] < end)
            now = "  ".join(f"{arm} {ms:.0f} ms" for arm, ms in step["ms"].items())
            warmup = brief(step["warmup"])
            progress.update(
                task, advance=1, description=f"{phase:9}", now=f"{now}  warmup {warmup}"
            )
            if not terminal and step["iteration"] % 8 == 7:
                console.print(f"iteration {step['iteration'] + 1}: {phase}, {now}, warmup {warmup}")

        summary = launch(options, out, on_progress)
    _show_or_print(args, summary, options)
    if why:  # again, as the first note is far above by now
        note(f"all messages went over gloo, for there is no engine: {why}")
    name = summary["interrupted"]
    return 128 + signal.Signals[name] if name else 0


def _show_or_print(args: argparse.Namespace, summary: Summary, options: DemoOptions) -> None:
    if args.json:
        print(json.dumps(summary))
    else:
        show(summary, options, Console())


def _one_rank(args: argparse.Namespace, options: DemoOptions) -> int:
    """Run one of the ranks that another program starts (torchrun, Slurm, a network laboratory)."""
    check_rank(os.environ, "--rank-from-env needs this variable, as torchrun sets it")
    host = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise BadInput(
            "MASTER_ADDR", host, f"it has to be a host that is known here: {line_of(error)}"
        ) from None
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from megatron_adaptra.demo.launch import prepare

    if os.environ["RANK"] == "0":
        prepare(options)
    from megatron_adaptra.demo.worker import run_rank  # torch reads the environment when imported

    status = run_rank(options.dump())
    if status == 0 and os.environ["RANK"] == "0":
        with open(f"{options.out}/summary.json", encoding="utf-8") as file:
            _show_or_print(args, json.load(file), options)
    return status
