"""All-reduces that are found while training, in a laboratory whose ports have a rate.

`python benchmarks/late_rank_lab.py`, as root: nobody is late, then one rank, then another one, then
nobody. First all iterations with native all-reduces, then the same with `auto`, in the same
processes. A rank that is slowed waits; what ranks compute is mostly a wait, too, so that two cores
are enough for eight of them. With `--healthy` nobody is late, and both trainings take turns. On a
busy machine: `chrt -r 1 python benchmarks/late_rank_lab.py`.

Of the distributed optimizer hosts are far from each other, since that is what a plan saves for it:
one is found while nobody is late yet, and has to stay when a rank is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from common import interval, markdown
from late_rank_lab_rank import DECISIONS, RESULT

from megatron_adaptra.base.units import parse_rate
from megatron_adaptra.cli.output import Table, show_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from run_records import read_log

RANK = Path(__file__).with_name("late_rank_lab_rank.py")
NBYTES = {"megatron": 3.3e6, "ddp": 3.3e6, "sharded": 0.9e6}  # of the gradients
SETTLED = 2  # iterations after a change that do not count
BLOCK = 6  # iterations of a turn, of which the first does not count


class Row(NamedTuple):
    """`trains`: as of Settings in late_rank_lab_rank.py. `slowed`: what a late rank takes more.

    `lateness`: of a late rank, in times of the buffer through a port. `delay`: of hosts, ms.
    """

    trains: str
    ranks: int
    slowed: float
    lateness: float
    delay: float = 0.0


ROWS = {
    "Megatron, 4 ranks, 30 %": Row("megatron", 4, 0.3, 0.7),
    "Megatron, 4 ranks, 50 %": Row("megatron", 4, 0.5, 0.7),
    "Megatron, 8 ranks, 30 %": Row("megatron", 8, 0.3, 0.8),
    # They compute for long: paths are measured over delays, and shall not share cores with that.
    "Megatron sharded, 4 ranks, 10 %": Row("sharded", 4, 0.1, 2.0, 40.0),
    "Megatron sharded, 8 ranks, 10 %": Row("sharded", 8, 0.1, 2.0, 10.0),
    "Megatron overlapped, 4 ranks, 30 %": Row("megatron overlapped", 4, 0.3, 0.7),
    "Megatron sharded and overlapped, 8 ranks, 10 %": Row("sharded overlapped", 8, 0.1, 2.0, 10.0),
    "Megatron sharded and gathered, 4 ranks, 10 %": Row(
        "sharded overlapped gathered", 4, 0.1, 2.0, 40.0
    ),
    "Megatron sharded and gathered, 8 ranks, 10 %": Row(
        "sharded overlapped gathered", 8, 0.1, 2.0, 10.0
    ),
    "torch's hook, 4 ranks, 30 %": Row("ddp", 4, 0.3, 0.7),
    "torch's hook, 4 ranks, 50 %": Row("ddp", 4, 0.5, 0.7),
    "torch's hook, 8 ranks, 30 %": Row("ddp", 8, 0.3, 0.8),
}


def row(words: str) -> tuple[str, Row]:
    """One that is asked for, TRAINS:RANKS:SLOWED:LATENESS[:DELAY], with its name."""
    trains, ranks, slowed, lateness, *delay = words.split(":")
    found = Row(trains, int(ranks), float(slowed), float(lateness), *map(float, delay))
    return f"{trains}, {ranks} ranks, {found.slowed:.0%}", found


def phases(ranks: int, options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Nobody is late, then the last rank but one, then rank 1, then nobody."""
    ends = [0]
    for late in (False, True, True, False):
        ends.append(ends[-1] + (options.late if late else options.in_time))
    return [
        (first, end, late)
        for (first, end), late in zip(pairwise(ends), (-1, ranks - 2, 1, -1), strict=True)
    ]


def run(
    settings: dict[str, Any], ranks: int, rate: str, timeout: float, delay: float = 0.0
) -> dict[str, Any]:
    """What all ranks have measured, and the decisions; without a `rate` on this host alone.

    `delay`: ms from each host to each other one.
    """
    with tempfile.TemporaryDirectory(prefix="adaptra-") as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks)]
        if rate:
            command = [sys.executable, "-m", "megatron_adaptra", "netlab", "run", "--no-measure"]
            command += ["--hosts", str(ranks), "--host", f"all:{rate}"]
            command += ["--delay", f"{delay:g}ms"] * bool(delay)
            command += ["--", sys.executable]
        done = subprocess.run([*command, str(RANK), str(path)], check=False, timeout=timeout)
        if done.returncode:
            raise SystemExit(f"the training has ended with status {done.returncode}")
        found: dict[str, Any] = json.loads((Path(folder) / RESULT).read_text())
        logs = list(Path(folder).glob(f"{DECISIONS.split('.')[0]}*"))
        made = [one for log in logs for one in read_log(log) if one["committed"]]
    return {**found, "decisions": [one for one in made if one["kind"] == "all-reduce"]}


def iterations(arm: dict[str, Any]) -> list[float]:
    """Milliseconds of each: of all ranks, which wait for each other, the mean."""
    return [1e3 * mean(of_ranks) for of_ranks in zip(*arm["seconds"], strict=True)]


def figures(done: dict[str, Any], spans: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """By phase, what was found when, predicted, and measured.

    A plan of an earlier phase that stays in force counts in this one, too.
    """
    native, auto = (iterations(done[arm]) for arm in ("native", "auto"))
    found = []
    for first, end, late in spans:
        before = [one for one in done["decisions"] if one["detected"] < first]
        mine = [one for one in done["decisions"] if first <= one["detected"] < end]
        row: dict[str, Any] = {
            "late": late,
            "native": median(native[first + SETTLED : end]),
            "decisions": len(mine),
            "plan": "native",
        }
        if mine or before:
            last = (mine or before)[-1]
            swap = last["iteration"]
            ours = auto[swap + 1 if mine else max(swap + 1, first + SETTLED) : end]
            row |= {
                "ours": median(ours) if ours else None,
                "plan": last["after"],
                "predicted gain": predicted_gain(last),
                "predicted": last["predicted_ms"],
                "measured": last.get("measured_ms"),
            }
        if mine:
            row |= {
                "found": mine[0]["detected"] - first + 1,
                "in force": swap - first,
                "before": median(auto[first : min(swap, end)]),
            }
        found.append(row)
    return found


def predicted_gain(decision: dict[str, Any]) -> float:
    """Milliseconds of an iteration that a decision expects to save over native.

    Of shards it is more than native's reduce-scatter and ours are apart: an all-gather follows.
    """
    figures = decision["figures"]
    return 0.0 if figures is None else 1e3 * float(decision["gain"] * figures["iteration"])


def apart(done: dict[str, Any]) -> str:
    """How far losses and parameters are from native's, and whether only plans can have done that.

    A loss is computed before gradients are reduced: that of the iteration in which the first plan
    comes into force is native's still. Afterwards sums are added up in another order.
    """
    digests = {one for arm in ("native", "auto") for one in done[arm]["digest"]}
    native, auto = (
        [mean(of_ranks) for of_ranks in zip(*done[arm]["losses"], strict=True)]
        for arm in ("native", "auto")
    )
    differ = [i for i, (a, b) in enumerate(zip(native, auto, strict=True)) if a != b]
    if len(digests) == 1 and not differ:
        return "losses and parameters are native's to the last bit"
    most = max(abs(a - b) / abs(a) for a, b in zip(native, auto, strict=True))
    alike = len(set(done["auto"]["digest"])) == 1
    first = done["decisions"][0]["iteration"] if done["decisions"] else None
    by_plan = not differ or (first is not None and differ[0] > first)
    return (
        f"losses ({native[0]:.4g} to {native[-1]:.4g}) differ from native's by {most:.1e} of "
        f"themselves at most, first in iteration {differ[0] if differ else None}"
        f"{'' if by_plan else ', NOT BY A PLAN'} (the first plan is in force from {first} on); "
        f"parameters are {'' if alike else 'NOT '}alike on all ranks"
    )


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """A row of the table: of a phase with nothing new, of a plan that came too late, or of one."""
    whose = f"rank {row['late']}" if row["late"] >= 0 else "nobody"
    shown = [name, whose, f"{row['native']:.0f}"]
    if not row["decisions"] and row["plan"] == "native":
        return [*shown, "no plan", *[""] * 6]
    new = [f"{row['found']}", f"{row['in force']}"] if row["decisions"] else ["before", ""]
    shown.append(f"{row['before']:.0f}" if row["decisions"] else "")
    if row["ours"] is None:
        return [*shown, "too late", *[""] * 3, *new]
    gain, predicted = row["native"] - row["ours"], row["predicted gain"]
    shown.append(f"{row['ours']:.0f}")
    if predicted:
        shown += [f"{gain:.0f} ({gain / row['native']:.1%})"]
        shown += [f"{predicted:.0f} ({predicted / row['native']:.1%})", f"{gain / predicted:.2f}"]
    else:
        shown += [f"{gain:.0f}", "0", ""]
    return [*shown, *new]


COLUMNS = [
    "run", "late", "native, ms", "before the plan, ms", "ours, ms", "gain, ms", "predicted, ms",
    "gain / predicted", "found in iteration", "in force after",
]  # fmt: skip


def label(name: str) -> str:
    """As a row is shown: with the release of Megatron that trains."""
    return name.replace("Megatron", f"Megatron {version('megatron-core')}", 1)


def late_ranks(options: argparse.Namespace) -> tuple[Table, list[str], list[Any]]:
    """The table, lines below it, and all that was measured."""
    rows, lines, kept = [], [], []
    for name, job in options.row or ROWS.items():
        if options.only not in name:
            continue
        spans = phases(job.ranks, options)
        buffer = NBYTES[job.trains.split()[0]] / parse_rate(options.rate)
        compute = job.lateness * buffer / job.slowed
        settings = {
            "trains": job.trains, "phases": spans, "compute": compute, "slowed": job.slowed,
            "min_gain": options.min_gain,
        }  # fmt: skip
        done = run(settings, job.ranks, options.rate, options.timeout, job.delay)
        found = figures(done, spans)
        # What is decided in the first phase is wrong, but where hosts are far from each other.
        shown = found[not (job.delay or found[0]["decisions"]) :]
        rows += [cells(label(name), row) for row in shown]
        lines.append(f"{label(name)}: {apart(done)}")
        kept.append({"name": name, "settings": settings, "figures": found, **done})
    return Table(f"Ports of {options.rate}, one rank late", COLUMNS, rows), lines, kept


def healthy(options: argparse.Namespace) -> tuple[Table, list[str], list[Any]]:
    """As `late_ranks`, where nobody is late, and no host far from another one."""
    rows, lines, kept = [], [], []
    for name, job in options.row or ROWS.items():
        if options.only not in name:
            continue
        if not options.row and job.slowed == 0.5:  # which others are without lateness
            continue
        name = f"{label(name.rsplit(',', 1)[0])}, {options.rate or 'one host'}"
        spans = [(BLOCK * i, BLOCK * (i + 1), -1) for i in range(options.turns + 1)]
        settings = {
            "trains": job.trains, "phases": spans, "compute": options.compute / 1e3, "slowed": 0.0,
            "min_gain": options.min_gain, "in_turns": True, "hooked": options.hooked,
        }  # fmt: skip
        done = run(settings, job.ranks, options.rate, options.timeout)
        native, auto = (iterations(done[arm]) for arm in ("native", "auto"))
        pairs = [
            (median(native[first + 1 : end]), median(auto[first + 1 : end]))
            for first, end, _ in spans[1:]
        ]
        ratios = [ours / theirs for theirs, ours in pairs]
        low, high = interval(ratios)
        rows.append([
            name, f"{median(a for a, _ in pairs):.1f}", f"{median(ratios):.4f}",
            f"{low:.4f} to {high:.4f}", str(len(ratios)), str(len(done["decisions"])),
        ])  # fmt: skip
        lines.append(f"{name}: {apart(done)}")
        kept.append({"name": name, "settings": settings, "ratios": ratios, **done})
    columns = ["run", "native, ms", "auto / native", "95 % of the median", "pairs", "decisions"]
    return Table("Nobody late, medians of turns", columns, rows), lines, kept


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", metavar="WORD", default="", help="rows whose name has it")
    parser.add_argument(
        "--row", type=row, action="append", metavar="TRAINS:RANKS:SLOWED:LATENESS[:DELAY]",
        help="another one, such as megatron:6:0.5:0.8, instead of all: a late rank takes half as "
        "long again, 0.8 buffers; hosts are DELAY ms from each other; may be given several times",
    )  # fmt: skip
    parser.add_argument("--rate", default="20MB/s", help="of a port; '': no laboratory")
    parser.add_argument("--in-time", type=int, default=16, help="iterations in which nobody is")
    parser.add_argument("--late", type=int, default=24, help="iterations for which a rank is")
    parser.add_argument("--min-gain", type=float, default=0.05, help="of an iteration")
    parser.add_argument("--healthy", action="store_true", help="nobody is late; in turns")
    parser.add_argument("--turns", type=int, default=20, help=f"of {BLOCK} iterations; --healthy")
    parser.add_argument(
        "--hooked", action="store_true", help="--healthy: torch's own hook runs native of torch's"
    )
    parser.add_argument("--compute", type=float, default=200, metavar="MS", help="of --healthy")
    parser.add_argument("--timeout", type=float, default=580, metavar="S", help="of a run")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured there, too")
    options = parser.parse_args(argv)
    table, lines, kept = (healthy if options.healthy else late_ranks)(options)
    if options.markdown:
        print(markdown(table))
    else:
        show_table(table)
    for line in lines:
        print(f"- {line}")
    if options.json:
        Path(options.json).write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
