"""What each part of the plugin gains over a really slow network: whole iterations of Megatron.

Every row is a training of its own, one rank per host of a laboratory (`adaptra netlab`): stock
Megatron; over gloo, a deeper warmup with receives posted when needed, as Megatron does; receives
posted ahead; and the small collectives of the iteration's end exchanged directly; then all of that
over the engine. Saved parameters and optimizer
states are compared by SHA-256. scripts/bench_whole_iteration.sh is its front.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.cli.output import Table, show_table
from megatron_adaptra.emulate.rules import LinkRule
from megatron_adaptra.emulate.scenario import load_rules
from megatron_adaptra.netlab.lab import Lab
from megatron_adaptra.view.theme import ADAPTRA, BOUND, STOCK

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "tests" / "support"))

from megatron_lm_process import DIGESTS, environment  # noqa: E402
from megatron_lm_rows import FLAGS, LINE  # noqa: E402
from run_records import read_log  # noqa: E402

# What is added to Megatron's command line, row by row.
GLOO = ("--adaptra", "--adaptra-transport", "gloo")
ROWS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "warmup": (*GLOO, "--adaptra-post-receives", "on-demand", "--adaptra-small-collectives", "off"),
    "post-receives": (*GLOO, "--adaptra-small-collectives", "off"),
    "small-collectives": GLOO,
    "engine": ("--adaptra", "--adaptra-transport", "engine"),
}
LOGGED = 3  # iterations per line: a logged one has barriers of its own


class Arm:
    """One training, and what is known of it."""

    def __init__(self, name: str, options: argparse.Namespace, work: Path, turn: int) -> None:
        self.name, self.options = name, options
        self.folder = work / f"{name}-{turn}"
        self.folder.mkdir()
        self.environment = environment(sys.executable, work / "tools")
        self.milliseconds: list[float] = []
        self.output: list[bytes] = []

    def run(self, rules: Sequence[LinkRule]) -> None:
        o = self.options
        command = [sys.executable, "-m", "megatron_adaptra.run", str(o.script)]
        command += [*_flags(o), "--save", str(self.folder / "checkpoint"), *ROWS[self.name]]
        if self.name != "stock":
            command += ["--adaptra-decision-log", str(self.folder / "decisions.jsonl")]
        with Lab(o.stages, rules, o.seed) as lab:
            statuses = lab.run(command, self.environment, self._collect, o.timeout)
        if o.logs is not None:
            o.logs.mkdir(parents=True, exist_ok=True)
            log = o.logs / self.folder.name
            log.with_suffix(".log").write_bytes(b"\n".join(self.output) + b"\n")
            if (decisions := self.folder / "decisions.jsonl").exists():
                shutil.copy(decisions, log.with_suffix(".decisions.jsonl"))
        if any(statuses):
            words = b"\n".join(self.output[-30:]).decode(errors="replace")
            raise AdaptraError(f"{self.name}: the ranks ended with {statuses}\n{words}")

    def _collect(self, _: int, line: bytes) -> None:
        self.output.append(line)
        if found := LINE.search(line.decode(errors="replace")):
            self.milliseconds.append(float(found[2]))

    @property
    def median_ms(self) -> float:
        """Of the last half: by then a slow link has been found, and planned for."""
        return median(self.milliseconds[len(self.milliseconds) // 2 :])

    @property
    def decision(self) -> dict[str, Any] | None:
        """What put the plan in force that is there at the end."""
        path = self.folder / "decisions.jsonl"
        if not path.exists():
            return None
        return next((d for d in reversed(read_log(path)) if d["committed"]), None)


def _flags(options: argparse.Namespace) -> list[str]:
    sizes = {
        "--log-interval": LOGGED,
        "--pipeline-model-parallel-size": options.stages,
        "--num-layers": options.stages,
        "--global-batch-size": options.microbatches,
        "--train-iters": options.iterations,
        "--save-interval": options.iterations,
    }
    return [*FLAGS, *(str(word) for item in sizes.items() for word in item)]


def digests(arms: Sequence[Arm], checkout: Path) -> list[dict[str, str]]:
    command = [
        sys.executable,
        DIGESTS,
        str(checkout),
        *(str(a.folder / "checkpoint") for a in arms),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=arms[0].environment
    )
    found: list[dict[str, str]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row(
    turns: Sequence[Arm], stock: Sequence[Arm], known: Sequence[Arm], same: bool
) -> dict[str, Any]:
    """`turns`: the same row, again and again, after `stock`'s. Without a decision an arm runs as
    stock does, for which the others have a prediction."""
    decisions = [arm.decision for arm in known if arm.decision is not None]
    mine = turns[-1].decision
    predicted = median(d["stock_ms"] for d in decisions) if decisions else None
    if mine:
        predicted = mine["refreshed_ms"] or mine["predicted_ms"]
    ratios = [s.median_ms / arm.median_ms for s, arm in zip(stock, turns, strict=True)]
    return {
        "name": turns[0].name,
        "iteration_ms": round(median(arm.median_ms for arm in turns), 1),
        "ratio_to_stock": round(median(ratios), 3 if len(ratios) > 1 else 2),
        "predicted_ms": None if predicted is None else round(predicted, 1),
        "identical": same,
    }


def rules_of(options: argparse.Namespace) -> list[str]:
    if options.delay in ("0", "0ms", "0s"):
        return []
    more = f",jitter={options.jitter}" if options.jitter else ""
    more += f",loss={options.loss}" if options.loss else ""
    return [f"{link}:{options.delay}{more}" for link in options.link.split(",")]


def measure(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    rules = load_rules(rules_of(options), options.stages, network=True)
    with Lab(options.stages, rules, options.seed) as lab:
        for link in lab.measure():
            if link.fault:
                print(f"this machine does not keep a link: {link.fault}", file=sys.stderr)
    arms: list[Arm] = []
    for turn in range(options.pairs):
        for name in options.rows if turn % 2 == 0 else reversed(options.rows):
            print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
            arms.append(Arm(name, options, work, turn))
            arms[-1].run(rules)
            print(f"{arms[-1].median_ms:.0f} ms", file=sys.stderr, flush=True)
    spec = importlib.util.find_spec("megatron.core")
    found = Path(spec.origin).parents[2] if spec is not None and spec.origin else ROOT
    checkout = options.script.parent if (options.script.parent / "megatron").is_dir() else found
    states = dict(zip(arms, digests(arms, checkout), strict=True))
    turns = {name: [arm for arm in arms if arm.name == name] for name in options.rows}
    return [
        row(own, turns[options.rows[0]], arms, all(states[a] == states[arms[0]] for a in own))
        for own in turns.values()
    ]


def plot(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """A bar per row, and what was predicted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.2), dpi=150)
    times = [r["iteration_ms"] for r in rows]
    colors = [STOCK] + [ADAPTRA] * (len(rows) - 1)
    axes.barh(range(len(rows)), times, color=colors, height=0.6)
    for i, r in enumerate(rows):
        x = max(r["iteration_ms"], r["predicted_ms"] or 0.0) + 0.015 * max(times)
        words = f"{r['iteration_ms']:.0f} ms   {r['ratio_to_stock']:.2f} x"
        axes.text(x, i, words, va="center", fontsize=9)
    known = [(r["predicted_ms"], i) for i, r in enumerate(rows) if r["predicted_ms"]]
    if known:
        axes.plot(*zip(*known, strict=True), "|", ms=16, mew=2, color=BOUND, label="predicted")
        axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.set_yticks(range(len(rows)), [r["name"] for r in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(times))
    axes.set_xlabel("ms per iteration", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_whole_iteration.sh", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("--stages", type=int, default=4, help="pipeline stages, one host each (default: 4)")
    add("--microbatches", type=int, default=12, help="per iteration (default: 12)")
    add("--link", default="2-3", help="slow links, both ways: 2-3 or 0-1,2-3 (default: 2-3)")
    add("--delay", default="40ms", help="each way; 0 for a healthy network (default: 40ms)")
    add("--jitter", default="", help="standard deviation, such as 8ms")
    add("--loss", default="", help="share of packets, such as 0.1%%")
    add("--iterations", type=int, default=30, help="per row (default: 30)")
    add("--pairs", type=int, default=1, metavar="N",
        help="run all rows N times in turns; ratios are medians of turns (default: 1)")  # fmt: skip
    add("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}; the first is compared with")
    add("--script", type=Path, default=ROOT / "tests/train/ranks/pretrain_gpt_small.py",
        help="training script, such as a checkout's pretrain_gpt.py (default: a small one, which "
        "needs megatron-core 0.17 or newer)")  # fmt: skip
    add("--seed", type=int, default=0, help="of jitter and loss")
    add("--timeout", type=float, default=600.0, help="seconds per row (default: 600)")
    add("--plot", type=Path, metavar="FILE", help="draw the rows there, a PNG or SVG")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    add("--logs", type=Path, metavar="FOLDER", help="keep there what each row printed and decided")
    options = parser.parse_args(argv)
    options.rows = options.rows.split(",")
    for name in options.rows:
        if name not in ROWS:
            parser.error(f"--rows {name}: known are {', '.join(ROWS)}")
    if options.iterations < 4 * LOGGED:
        parser.error(f"--iterations {options.iterations}: at least {4 * LOGGED}")
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least 1")
    if not options.script.is_file():
        parser.error(f"--script {options.script}: there is no such file")
    options.script = options.script.resolve()
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="adaptra-bench-") as work:
        try:
            rows = measure(options, Path(work))
        except AdaptraError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    cells = [["-" if value is None else str(value) for value in r.values()] for r in rows]
    what = f"{', '.join(rules_of(options)) or 'healthy network'}: {options.stages} stages, "
    title = f"{what}{options.microbatches} microbatches"
    if options.plot:
        plot(rows, title, options.plot)
    show_table(Table(title, list(rows[0]), cells))
    if options.json:
        settings = {k: str(v) for k, v in vars(options).items() if k != "json"}
        options.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    return 0 if all(r["identical"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
