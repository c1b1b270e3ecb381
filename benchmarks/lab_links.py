"""What a training finds out about a link of a laboratory that is late, thin, or both.

`python benchmarks/lab_links.py --out FOLDER`, as root. Each row is a run of `adaptra demo --netlab`
whose record goes through the estimator again: what is known of the link ten iterations after it has
changed, what an iteration of the plan in force is predicted to take then, and what such iterations
have taken.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path
from statistics import median

from common import markdown

from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.cli.output import Table
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.estimate import Estimator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from run_records import Recorded, read_record

ROWS = {
    "20 MB/s": "20MB/s",
    "40 ms": "40ms",
    "both": "40ms,bandwidth=20MB/s",
}
AFTER = 10  # iterations


def train(folder: Path, slow: str, options: argparse.Namespace) -> Recorded:
    """Run the demo, unless it has run, and read its record."""
    path = folder / "replica-0.jsonl"
    if path.exists():
        return read_record(path)[-1]
    begin, end = options.healthy, options.healthy + options.slow
    command = [
        sys.executable, "-m", "megatron_adaptra", "demo", "--netlab", "--out", str(folder),
        "--iterations", str(end),
        "--slow", f"{options.stages - 2}-{options.stages - 1}:{slow}@{begin}..{end}",
        "--seq-length", str(options.seq_length), "--hidden-size", str(options.hidden_size),
        "--microbatches", str(options.microbatches), "--stages", str(options.stages),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=options.timeout
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}{done.stderr[-2000:]}\nexit status {done.returncode}")
    return read_record(path)[-1]


def in_force(record: Recorded, iteration: int) -> Schedule:
    """The schedule that ran in it."""
    now = Schedule.from_json(record.about["start"])
    for decision in record.decisions:
        if decision.get("committed") and decision["iteration"] <= iteration:
            now = Schedule.parse(decision["plan"])
    return now


def row(name: str, record: Recorded, options: argparse.Namespace) -> list[str]:
    estimator = Estimator.from_settings(record.about["estimator"])
    rule, last = ReplanPolicy(**record.about["rule"]), max(record.iterations)
    for i, iteration in record.iterations.items():
        # The first one warms up. Both trainings take turns of several iterations, so when the link
        # has changed in this one is only known from what it has seen.
        if 0 < i <= last and estimator.update(iteration.reports):
            estimator.accept()
            last = min(last, i + AFTER - 2)  # a change is confirmed in its second iteration
    conditions = estimator.conditions(corrected=False)
    cells = []
    for link in (
        (options.stages - 2, options.stages - 1),
        (options.stages - 1, options.stages - 2),
    ):
        state = conditions.link(*link)
        rate = "no limit" if math.isinf(state.bandwidth) else f"{state.bandwidth / 1e6:.1f} MB/s"
        cells.append(f"{1e3 * state.delay:.1f} ms, {rate}")
    plan = in_force(record, last)
    took = [s for i, s in record.seconds().items() if i > last - 3 and in_force(record, i) == plan]
    predicted, measured = rule.evaluate(plan, conditions).predicted, median(took)
    ratio = f"{predicted / measured - 1:+.0%}"
    return [name, *cells, f"{1e3 * predicted:.0f}", f"{1e3 * measured:.0f} ({ratio})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder for the runs; those there count"
    )
    parser.add_argument("--only", choices=ROWS, help="one row")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--healthy", type=int, default=10, help="iterations")
    parser.add_argument("--slow", type=int, default=20, help="iterations")
    parser.add_argument("--timeout", type=float, default=580)
    options = parser.parse_args()
    rows = []
    for name, flags in ROWS.items():
        if options.only in (None, name):
            folder = options.out / name.replace(" ", "-").replace("/", "-")
            rows.append(row(name, train(folder, flags, options), options))
    columns = ["both ways", "there", "back", "predicted, ms", "measured, ms"]
    print(markdown(Table(f"{AFTER} iterations after the last link has changed", columns, rows)))


if __name__ == "__main__":
    main()
