"""What shares of microbatches gain in real trainings of Megatron, found while training.

`python benchmarks/replica_shares.py`; on a busy machine `chrt -r 1 python ...`. A replica of one
stage gets slow and is as fast as others again, in a training with as many microbatches for each
replica, and then in the same one with shares of them. In the emulated rows all ops wait several
times as long as they compute, for a machine with fewer cores than replicas. In the row `suspended`
a replica is really slow: its process is suspended for half of each period (SIGSTOP, SIGCONT).

`--healthy`: what shares cost while nobody is slow. One training, with shares in every second block
of iterations; each of these blocks is compared with those around it, median by median.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import interval, markdown
from replica_shares_rank import RESULT, SLOW
from suspended import ranks_of, suspend

from megatron_adaptra.cli.output import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from run_records import read_log

RANK = Path(__file__).with_name("replica_shares_rank.py")
FROM, TO, ITERATIONS = 10, 34, 54  # the slow phase, and all
SETTLED = 2  # iterations after a change that do not count
WAITS = 8  # times as long as it computes an op of an emulated row takes


class Job(NamedTuple):
    """`slow`: how many times as long; of one that is suspended 1 / the share in which it runs.

    `waits`: ops wait for most of their time. Else they compute for all of it.
    """

    replicas: int
    microbatches: int
    slow: float
    hidden: int = 64
    waits: bool = True
    suspended: bool = False


JOBS = {
    "4 x 8, one at half speed": Job(4, 8, 2.0),
    "4 x 8, one at two thirds": Job(4, 8, 1.5),
    "2 x 8, one suspended half of the time": Job(2, 8, 2.0, 192, waits=False, suspended=True),
}


def rules(job: Job) -> list[str]:
    """Emulated workers; of two rules for one the first one counts."""
    if not job.waits:
        return []
    last, waits = job.replicas - 1, [f"{replica}.0:{WAITS}x" for replica in range(job.replicas)]
    return [f"{last}.0:{WAITS * job.slow:g}x@{FROM}..{TO}", *waits]


# Nobody is slow, and counts cannot change.
HEALTHY = {
    "4 x 8, ops wait": Job(4, 8, 1.0),
    "2 x 8, ops compute": Job(2, 8, 1.0, 192, waits=False),
}
BLOCK = 10  # iterations; every second block has shares


def suspend_while_slow(
    pid: int, job: Job, folder: Path, over: threading.Event, period: float
) -> None:
    """Suspend the last replica of the training `pid` now and then, while there is a file SLOW."""
    while not over.wait(0.001):
        if not (folder / SLOW).exists():
            continue
        healed = threading.Event()
        victim = [process for rank, process in ranks_of(pid) if rank == job.replicas - 1]
        thread = threading.Thread(target=suspend, args=(victim, healed, period, 1 / job.slow))
        thread.start()
        while (folder / SLOW).exists() and not over.is_set():
            time.sleep(0.001)  # a file has no event
        healed.set()
        thread.join()


def run(job: Job, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What all ranks have measured, and the decisions that came into force."""
    settings = {
        "microbatches": job.microbatches, "hidden": job.hidden, "seq_length": 64,
        "iterations": ITERATIONS, "slow_from": FROM, "slow_to": TO, "emulated": rules(job),
    }  # fmt: skip
    if arguments.healthy:
        settings |= {"block": BLOCK, "iterations": BLOCK * arguments.blocks}
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(job.replicas), str(RANK), str(path)]
    over = threading.Event()
    with subprocess.Popen(command) as training:
        words = (training.pid, job, folder, over, arguments.period / 1e3)
        watch = threading.Thread(target=suspend_while_slow, args=words)
        if job.suspended:
            watch.start()
        try:
            training.wait(arguments.timeout)
        finally:
            over.set()
            training.kill()
            if job.suspended:
                watch.join()
    if training.returncode:
        raise SystemExit(f"the training has ended with status {training.returncode}")
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    logs = (folder / "share").glob("*.sync.jsonl")
    made = [one for log in logs for one in read_log(log) if one["committed"]]
    return {**found, "decisions": made}


def iterations(arm: dict[str, Any]) -> list[float]:
    """Milliseconds of each, of the rank that took longest."""
    return [1e3 * max(of_ranks) for of_ranks in zip(*arm["seconds"], strict=True)]


def cost(name: str, done: dict[str, Any]) -> list[str]:
    """What shares cost in a training of blocks."""
    each = iterations(done)
    blocks = [each[i + SETTLED : i + BLOCK] for i in range(0, len(each), BLOCK)]
    off, on = [median(block) for block in blocks[::2]][1:], [median(b) for b in blocks[1::2]][1:]
    around = pairwise(off)
    ratios = [ours / ((one + other) / 2) for ours, (one, other) in zip(on, around, strict=True)]
    low, high = interval(ratios)
    return [
        name, f"{median(off):.1f}", f"{median(on):.1f}", f"{median(ratios):.4f}",
        f"{low:.4f} to {high:.4f}", f"{len(ratios)}",
    ]  # fmt: skip


def figures(done: dict[str, Any]) -> dict[str, Any]:
    """Of a run, in milliseconds and iterations."""
    full, ours = iterations(done["full"]), iterations(done["share"])
    counts = done["share"]["counts"][0]
    relieved = [one for one in done["decisions"] if FROM <= one["iteration"] < TO]
    equal = [i for i in range(TO, ITERATIONS) if len(set(counts[i])) == 1]
    losses = [
        abs(a - b) / abs(a) for a, b in zip(*(mean_losses(done[arm]) for arm in ("full", "share")),
        strict=True)
    ]  # fmt: skip
    row: dict[str, Any] = {
        "healthy": median(full[SETTLED:FROM]), "full": median(full[FROM + SETTLED : TO]),
        "losses": max(losses), "changes": len(done["decisions"]),
        "back": equal[0] - TO if equal else None,
    }  # fmt: skip
    if relieved:
        last = relieved[-1]
        row |= {
            "after": relieved[0]["iteration"] - FROM, "counts": last["after"],
            "share": median(ours[last["iteration"] + SETTLED : TO]),
            "predicted": last["predicted_ms"], "predicted full": last["full_ms"],
        }  # fmt: skip
    return row


def mean_losses(arm: dict[str, Any]) -> list[float]:
    """Of each iteration, over all its microbatches."""
    by_iteration = zip(*arm["losses"], strict=True)
    every = [[one for of_rank in ranks for one in of_rank] for ranks in by_iteration]
    return [sum(each) / len(each) for each in every]


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """Of one run."""
    shown = [name, f"{row['healthy']:.0f}", f"{row['full']:.0f}"]
    if "share" not in row:
        return [*shown, "not found", *[""] * 4, f"{row['losses']:.0e}"]
    return [
        *shown, ",".join(map(str, row["counts"])), f"{row['share']:.0f}",
        f"{row['share'] / row['full']:.2f}",
        f"{row['predicted']:.0f} ({100 * (row['share'] / row['predicted'] - 1):+.0f} %)",
        f"{row['after']}, {'never' if row['back'] is None else row['back']}",
        f"{row['losses']:.0e}",
    ]  # fmt: skip


COLUMNS = [
    "job", "healthy, ms", "as many each, ms", "counts", "ours, ms", "of as many each",
    "predicted, ms", "found, and back, after", "losses apart",
]  # fmt: skip


COSTS = ["nobody slow", "without, ms", "with shares, ms", "of without", "95 %", "pairs"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each row")
    parser.add_argument("--only", metavar="WORD", default="", help="rows whose name has it")
    parser.add_argument("--healthy", action="store_true", help="what it costs where nobody is slow")
    parser.add_argument("--blocks", type=int, default=41, metavar="N", help="with --healthy; odd")
    parser.add_argument("--period", type=float, default=10, metavar="MS", help="of a suspended one")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of a run")
    parser.add_argument("--json", metavar="FILE", help="write all runs there, too")
    arguments = parser.parse_args(argv)
    rows, kept = [], []
    for name, job in (HEALTHY if arguments.healthy else JOBS).items():
        for _ in range(arguments.runs if arguments.only in name else 0):
            with tempfile.TemporaryDirectory(prefix="adaptra-") as folder:
                done = run(job, arguments, Path(folder))
            row = {} if arguments.healthy else figures(done)
            rows.append(cost(name, done) if arguments.healthy else cells(name, row))
            kept.append({"name": name, **row, **done})
    columns = COSTS if arguments.healthy else COLUMNS
    print(markdown(Table("Shares of microbatches", columns, rows)))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
