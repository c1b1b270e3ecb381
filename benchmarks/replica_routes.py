"""What routes between replicas gain in real trainings: `adaptra demo`, row by row.

`python benchmarks/replica_routes.py`. Both arms of the demo take turns in the same processes, so
stock Megatron sees the same slow worker or path. In the emulated rows all workers wait about ten
times as long as they compute, for a machine with fewer cores than workers: so an op takes what it
would on a device of its own. In the row `stopped` a worker is really slow: its process is suspended
for most of each period (SIGSTOP, SIGCONT), which is about as long as one of its ops.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import markdown
from suspended import ranks_of, suspend

from megatron_adaptra.cli.output import Table

# How many times as long as they compute workers of the emulated rows take, by stage: their stages
# take about as long as each other, although the last one has the loss.
SLOW = (10, 12, 8)
FROM, TO = 24, 84  # the demo prints a line every 8 iterations


def workers(replicas: int, stages: int, *first: str) -> list[str]:
    """Flags that make all workers slow in the whole run; rules that come `first` count before."""
    others = (f"{r}.{s}:{SLOW[s]}x@0.." for r in range(replicas) for s in range(stages))
    return [word for rule in (*first, *others) for word in ("--slow", rule)]


JOBS: dict[str, tuple[int, int, int, list[str]]] = {  # replicas, stages, microbatches, flags
    "2 x 3 x 8, a worker at half speed": (
        2, 3, 8, workers(2, 3, f"1.1:{2 * SLOW[1]}x@{FROM}..")
    ),
    "2 x 3 x 8, a path of 40 ms": (
        2, 3, 8,
        [*workers(2, 3), "--slow", f"0.1-0.2:40ms@{FROM}..", "--reroute", "swap"],
    ),
    "2 x 2 x 8, a worker stopped": (2, 2, 8,
        ["--reroute", "auto", "--slow", f"0.0:1x@{FROM}..{TO}"],
    ),
}  # fmt: skip
HIDDEN = {"2 x 2 x 8, a worker stopped": 192}  # ops that take about a period


def stop(
    demo: subprocess.Popen[str], worker: int, over: threading.Event, period: float, share: float
) -> None:
    """Suspend the process of `worker` for most of each period, from iteration FROM on."""
    assert demo.stderr is not None
    for line in demo.stderr:  # such as "iteration 24: ..."
        if (at := re.match(r"iteration (\d+):", line)) and int(at[1]) >= FROM:
            break
    threading.Thread(target=demo.stderr.read, daemon=True).start()  # or the demo would wait
    if worker in (found := dict(ranks_of(demo.pid))):
        suspend([found[worker]], over, period, share)


def train(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row: medians of the slow phase, what was predicted, and when it was found."""
    replicas, stages, count, flags = JOBS[name]
    command = [
        sys.executable, "-m", "megatron_adaptra", "demo", "--json", "--out", str(folder / "demo"),
        "--replicas", str(replicas), "--stages", str(stages), "--microbatches", str(count),
        "--hidden-size", str(HIDDEN.get(name, 32)), "--seq-length", "32",
        "--iterations", str(TO), *flags,
    ]  # fmt: skip
    over = threading.Event()
    stopped = "stopped" in name
    errors = subprocess.PIPE if stopped else None
    with (folder / "printed").open("w") as printed:
        demo = subprocess.Popen(command, stdout=printed, stderr=errors, text=True)
    if stopped:
        worker = (replicas - 1) * stages + stages - 1
        cycle = arguments.period / 1e3, arguments.share
        threading.Thread(target=stop, args=(demo, worker, over, *cycle), daemon=True).start()
    try:
        demo.wait(timeout=arguments.timeout)
    finally:
        over.set()
        demo.kill()
    if demo.returncode:
        raise SystemExit(f"{name}: the demo has ended with status {demo.returncode}")
    if arguments.keep:
        shutil.copytree(folder / "demo", arguments.keep, dirs_exist_ok=True)
    done = json.loads((folder / "printed").read_text())
    slow = {arm: done["arms"][arm]["phases"]["slow"]["iteration_ms"] for arm in done["arms"]}
    last = done["replans"][-1] if done["replans"] else {}
    return {
        "name": name,
        "untreated_ms": slow["stock"],
        "ours_ms": last.get("measured_ms"),
        "predicted_ms": last.get("predicted_ms"),
        "found_after": done["detected_after_iterations"],
        "replans": len(done["replans"]),
        "healthy_ms": done["arms"]["stock"]["phases"]["healthy"]["iteration_ms"],
        "bits": done["losses_identical"] and done["parameters_identical"],
        "difference": done["losses_difference"],
        "why": last.get("why", ""),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="of each row; medians are shown")
    parser.add_argument("--only", metavar="WORD", default="", help="rows whose name has it")
    parser.add_argument(
        "--period", type=float, default=10, metavar="MS", help="of a stopped worker"
    )
    parser.add_argument("--share", type=float, default=0.12, help="of it, in which it computes")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what the demo writes")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a run")
    parser.add_argument("--json", metavar="FILE", help="write all runs there, too")
    arguments = parser.parse_args(argv)
    rows, runs = [], []
    for name in (name for name in JOBS if arguments.only in name):
        mine = []
        for _ in range(arguments.runs):
            with tempfile.TemporaryDirectory(prefix="adaptra-") as folder:
                mine.append(train(name, arguments, Path(folder)))
        runs += mine
        treated = [one for one in mine if one["ours_ms"]]
        if not treated:
            rows.append([name, "no plan", "", "", "", ""])
            continue
        ratio = median(one["untreated_ms"] / one["ours_ms"] for one in treated)
        off = median(one["ours_ms"] / one["predicted_ms"] - 1 for one in treated)
        cells = [median(one[key] for one in treated) for key in ("untreated_ms", "ours_ms")]
        found = median(one["found_after"] for one in treated)
        rows.append([
            f"{name} ({len(treated)} of {len(mine)} runs)", *(f"{x:.0f}" for x in cells),
            f"{ratio:.2f}", f"{100 * off:+.0f} %", f"{found:.0f}",
        ])  # fmt: skip
    columns = ["job", "untreated, ms", "ours, ms", "x", "against predicted", "found after"]
    print(markdown(Table("Routes between replicas", columns, rows)))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
