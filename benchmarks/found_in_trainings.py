"""How often is it named rightly who is slow? Trainings in which something is slow now and then.

    python benchmarks/found_in_trainings.py "slow link" "slow worker" --cases 25

Of each kind one training of Megatron's own program runs all cases, one after the other, with
iterations between them in which nothing is slow. Rank, link and amount are drawn by the seed. A
case is right if it is found once, in time, by the right global ranks, and closed before the next
one begins, and if nothing else is found meanwhile. Each rank runs on one core of its own, or shares
it with the others; a host gets busy by other programs on these cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import markdown

from megatron_adaptra.cli.output import Table
from megatron_adaptra.diagnose.finding import (
    CLOSED,
    GARBAGE,
    HOST,
    LATE,
    LINK,
    LOADER,
    OPENED,
    REPLICA,
    THIN_LINK,
    WORKER,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]
from megatron_lm_rows import FLAGS, LINE  # noqa: E402

PROGRAMS = ROOT / "tests" / "train" / "ranks"
PROGRAM, SLOW_PARTS = PROGRAMS / "pretrain_gpt_small.py", PROGRAMS / "slow_parts_pretrain.py"
# Iterations: to the first case, of one, between two, at the end.
FIRST, SLOW, WELL, LAST = 24, 14, 26, 26
IN_TIME = 4  # iterations until it is found
HEALTHY = "nothing"
CORES = sorted(os.sched_getaffinity(0))


class Case(NamedTuple):
    """A case makes `ranks` slow from iteration `begin` on until `end`, from 0.

    `rule`: what does it, without the period; several with blanks between.
    """

    begin: int
    end: int
    ranks: frozenset[int]
    rule: str

    @property
    def text(self) -> str:
        """The rule, or the rules, with its period."""
        return ",".join(f"{one}@{self.begin}..{self.end}" for one in self.rule.split())


Drawn = tuple[set[int], str]  # the ranks and the rule of a case


@dataclass(frozen=True)
class Kind:
    """A kind of finding comes from cases that `draw` draws, in a training with these `flags`.

    `flag`: takes a rule; "" for those of SLOW_PARTS. `load`: other programs on the cores instead.
    `in_time`: iterations until it is to be found.
    """

    draw: Callable[[random.Random], Drawn]
    flag: str = ""
    load: bool = False
    flags: tuple[str, ...] = ("--pipeline-model-parallel-size", "4")
    ranks: int = 4
    in_time: int = IN_TIME


def _link(rng: random.Random) -> Drawn:
    a, ms = rng.randrange(3), rng.randrange(15, 120)
    return {a, a + 1}, f"{a}{rng.choice('->')}{a + 1}:{ms}ms"


def _thin(rng: random.Random) -> Drawn:
    a, rate = rng.randrange(3), rng.uniform(0.15, 0.6)
    return {a, a + 1}, f"{a}-{a + 1}:0ms,bandwidth={rate:.2f}MB/s"


def _worker(rng: random.Random) -> Drawn:
    rank, times = rng.randrange(2), rng.uniform(2.2, 5.0)
    return {rank}, f"0.{rank}:{times:.1f}x"


def _host(rng: random.Random) -> Drawn:
    loops = rng.randrange(2, 5)
    return {0, 1}, str(loops)


def _loader(rng: random.Random) -> Drawn:
    rank, ms = rng.choice((0, 3)), rng.randrange(15, 60)  # first and last stage read batches
    return {rank}, f"loader:{rank}:{ms}ms"


def _garbage(rng: random.Random) -> Drawn:
    ms = rng.randrange(80, 250)
    return {0, 1, 2, 3}, f"garbage:turns:{ms}ms"


def _late(rng: random.Random) -> Drawn:
    rank, ms = rng.randrange(4), rng.randrange(150, 500)
    return {rank}, f"late:{rank}:{ms}ms"


def _replica(rng: random.Random) -> Drawn:
    replica, times = rng.randrange(2), rng.uniform(2.0, 4.0)
    rules = [f"{replica}.{stage}:{times:.1f}x" for stage in (0, 1)]
    return {replica, replica + 2}, " ".join(rules)


TWO_STAGES = ("--pipeline-model-parallel-size", "2")
KINDS = {
    LINK: Kind(_link, "--adaptra-emulate-link"),
    THIN_LINK: Kind(_thin, "--adaptra-emulate-link"),
    WORKER: Kind(_worker, "--adaptra-emulate-worker", flags=TWO_STAGES, ranks=2),
    HOST: Kind(
        _host, load=True, ranks=2, flags=TWO_STAGES, in_time=8,
    ),
    LOADER: Kind(_loader, in_time=5),
    GARBAGE: Kind(_garbage, in_time=8),
    LATE: Kind(_late, flags=(*TWO_STAGES, "--adaptra-allreduce", "auto"), in_time=5),
    REPLICA: Kind(
        _replica, "--adaptra-emulate-worker", flags=(*TWO_STAGES, "--adaptra-act", "observe"),
        in_time=5,
    ),
    HEALTHY: Kind(lambda rng: (set(), "")),
}  # fmt: skip


class Load:
    """A load runs busy loops on all cores while it is on."""

    def __init__(self) -> None:
        self._loops: list[subprocess.Popen[bytes]] = []

    def on(self, per_core: int) -> None:
        """Begin with so many loops on each core."""
        words = [sys.executable, "-c", "while True: pass"]
        for core in CORES * per_core:
            self._loops.append(subprocess.Popen(["taskset", "-c", str(core), *words]))

    def off(self) -> None:
        """End all loops."""
        for loop in self._loops:
            loop.kill()
            loop.wait()
        self._loops.clear()


def cases_of(kind: Kind, rng: random.Random, count: int) -> list[Case]:
    """Draw `count` cases, one after the other."""
    cases = []
    for number in range(count):
        begin = FIRST + number * (SLOW + WELL)
        ranks, rule = kind.draw(rng)
        cases.append(Case(begin, begin + SLOW, frozenset(ranks), rule))
    return cases


def train(
    kind: Kind, cases: Sequence[Case], folder: Path, timeout: float
) -> tuple[list[dict[str, Any]], list[float]]:
    """Run a training with these `cases`; return its events, and the ms of each iteration."""
    log = folder / "decisions.jsonl"
    rules = [case.text for case in cases if case.rule and not kind.load]
    flags = [word for rule in rules for word in (kind.flag, rule) if kind.flag]
    length = str(cases[-1].end + LAST)
    words = [
        str(SLOW_PARTS), "" if kind.flag else ",".join(rules), str(PROGRAM), *FLAGS,
        "--num-layers", "4", "--global-batch-size", "12", "--train-iters", length, *kind.flags,
        "--adaptra", "--adaptra-decision-log", str(log), "--adaptra-record", str(folder / "record"),
        *flags,
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{PROGRAMS}", "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(random.randrange(20000, 30000)), "WORLD_SIZE": str(kind.ranks),
    }  # fmt: skip
    processes, load, ms = [], Load(), list[float]()
    for rank in range(kind.ranks):
        core = str(CORES[rank % len(CORES)])
        command = ["taskset", "-c", core, sys.executable, "-m", "megatron_adaptra.run", *words]
        place = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        out = subprocess.PIPE if rank == kind.ranks - 1 else (folder / f"rank{rank}").open("w")
        begun = subprocess.Popen(
            command, env=place, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True
        )
        processes.append(begun)
    timer = threading.Timer(timeout, lambda: [process.kill() for process in processes])
    timer.start()
    begins = {case.begin: int(case.rule) for case in cases if kind.load}
    ends = {case.end for case in cases}
    try:
        assert processes[-1].stdout is not None
        with (folder / "last").open("w") as printed:
            for line in processes[-1].stdout:
                printed.write(line)
                if match := LINE.search(line):
                    ms.append(float(match[2]))
                    if len(ms) in begins:
                        load.on(begins[len(ms)])
                    if len(ms) in ends:
                        load.off()
        status = [process.wait(60) for process in processes]
    finally:
        timer.cancel()
        load.off()
        for process in processes:
            process.kill()
    if any(status):
        last = [(folder / name).read_text()[-2000:] for name in ("rank0", "last")]
        sys.exit(f"{''.join(last)}\nexit status {status}, in {folder}")
    path = folder / "decisions.findings.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [], ms


def wrong(
    what: str, case: Case, until: int, events: Sequence[dict[str, Any]], in_time: int
) -> tuple[str, int]:
    """Return the fault of one `case`, or "", and after how many iterations it was found.

    `until`: the begin of the next one. A finding that changes is of its last kind and ranks. One
    that another explains has no line, and does not count.
    """
    lines = {e["id"] for e in events if e["state"] != CLOSED and not e["because"]}
    opened = [e for e in events if e["state"] == OPENED and e["id"] in lines]
    mine = [e for e in opened if case.begin <= e["found"] < until]
    last = {e["id"]: e for e in events if e["state"] != CLOSED}
    named = {name: frozenset(place["rank"] for place in e["where"]) for name, e in last.items()}
    found = [(last[e["id"]]["what"], named[e["id"]], e) for e in mine]
    if what == HEALTHY:
        return (f"a {found[0][0]}" if found else ""), 0
    right = [e for kind, ranks, e in found if kind == what and ranks == case.ranks]
    others = [f"a {kind} of {sorted(ranks)}" for kind, ranks, e in found if e not in right]
    if not right:
        return (f"{others[0]} instead" if others else "not found"), 0
    if others:
        return f"{others[0]}, too", 0
    if len(right) > 1:
        return "found twice", 0
    after = right[0]["found"] - case.begin + 1
    closed = [e for e in events if e["state"] == CLOSED and e["id"] == right[0]["id"]]
    if not closed:
        return "never closed", 0
    return ("found late" if after > in_time else ""), after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; or all")
    parser.add_argument("--cases", type=int, default=25, help="of each kind")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one training")
    parser.add_argument("--keep", type=Path, help="folder for what trainings print")
    options = parser.parse_args()
    print(f"seed {options.seed}\n", flush=True)
    columns = ("slow", "cases", "right", "after iterations", "iteration, ms", "wrong")
    rows = list[list[str]]()
    for what in options.kinds or KINDS:
        kind = KINDS[what]
        cases = cases_of(kind, random.Random(f"{options.seed} {what}"), options.cases)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.keep or Path(temporary)) / what.replace(" ", "-")
            folder.mkdir(parents=True)
            events, ms = train(kind, cases, folder, options.timeout)
        faults: Counter[str] = Counter()
        soon: list[int] = []
        for case, after in zip(cases, [*cases[1:], None], strict=True):
            fault, found = wrong(what, case, after.begin if after else 10**9, events, kind.in_time)
            faults[fault] += 1
            soon += [found] if not fault else []
            if fault:
                print(f"{what}: {sorted(case.ranks)} {case.text}: {fault}", flush=True)
        well = [
            e for e in events if e["state"] == OPENED and e["found"] < FIRST and not e["because"]
        ]
        faults.update(f"a {e['what']} before the first case" for e in well)
        right = faults.pop("", 0)
        words = ", ".join(f"{n} {fault}" for fault, n in faults.most_common()) or "none"
        when = f"{median(soon):g} (at most {max(soon)})" if soon and what != HEALTHY else ""
        share = f"{right} ({right / len(cases):.0%})"
        rows.append([what, f"{len(cases)}", share, when, f"{median(ms):.0f}", words])
        print(f"{what}: {right} of {len(cases)} right; wrong: {words}", flush=True)
    title = f"{options.cases} cases of each kind, in trainings"
    print(f"\n{markdown(Table(title, columns, rows))}")


if __name__ == "__main__":
    main()
