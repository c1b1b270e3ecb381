"""Checks and measures the executor on one CUDA GPU that several processes share.

Equality: the cases of tests/adapter/cases.py, Megatron's schedule against ours, bit for bit.
Overhead: microseconds per op beyond Megatron's own schedule, with one stage and with four.
Memory: peak bytes of activations against those predicted. Writes its section of
docs/evidence/gpu.md. scripts/gpu_check.sh is its front.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from megatron_adaptra.cli.output import Table
from megatron_adaptra.processes import started

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "adapter"
sys.path[:0] = [str(TESTS), str(TESTS.parent), str(ROOT / "benchmarks")]

from cases import LAYOUTS, Case, matrix  # noqa: E402
from common import markdown  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "gpu.md"
HEADING = "## What scripts/gpu_check.sh found"
SAME = ("losses", "steps", "parameters", "random", "statistics")
QUICK = ("1f1b", "zb-h1")  # policies
PARTS = ("equality", "overhead")
APEX = "fused_weight_gradient_mlp_cuda"


def ranks(count: int, options: argparse.Namespace, *arguments: str) -> tuple[str, str]:
    """What `count` processes of gpu_check_rank.py print, and why they ended early, if they did;
    nothing of them stays."""
    path = os.pathsep.join(map(str, (ROOT, TESTS, TESTS.parent, os.environ.get("PYTHONPATH", ""))))
    env = {
        **os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS gives the same bits every time with it
    }  # fmt: skip
    if options.cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), str(ROOT / "benchmarks/gpu_check_rank.py")]
    command += arguments
    wrong = ""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, 5.0, env=env, text=True, **pipes) as process:
        try:
            out, said = process.communicate(timeout=options.timeout)
            if process.returncode:
                wrong = f"{arguments[0]}, {count} ranks: exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            out, said = process.communicate(timeout=60)
            wrong = f"{arguments[0]}, {count} ranks: not done after {options.timeout:g} s"
    if wrong:
        print(said[-6000:], file=sys.stderr)
    return out[: out.rfind("\n") + 1], wrong  # a killed rank may leave half a line


def chosen(layout: str, options: argparse.Namespace) -> list[Case]:
    """A layout's cases; those with the fused kernel only where it, or its stand-in, runs."""
    fused = options.cpu or importlib.util.find_spec(APEX) is not None
    cases = [case for case in matrix(layout) if fused or not case.shape.fused]
    if options.quick:
        plain = f"{layout} fp32"
        cases = [c for c in cases if c.policy in QUICK and c.name.startswith(plain)]
    return cases


def differs(ranks_of_case: Sequence[dict[str, Any]]) -> list[str]:
    """What of a case is not as it is under Megatron's schedule."""
    both = [(rank["ours"], rank["stock"]) for rank in ranks_of_case]
    found = [what for what in SAME if any(ours[what] != stock[what] for ours, stock in both)]
    peaks = [(p, ours["predicted_peak"]) for ours, _ in both for p in ours["peaks"]]
    if any(abs(peak - predicted) > 1e-6 for peak, predicted in peaks):
        found.append("microbatches in flight")
    return found


def equality(options: argparse.Namespace, work: Path) -> tuple[list[Table], list[str]]:
    """A row per layout, and what is wrong."""
    rows, wrong = [], []
    for layout in options.layouts:
        cases = chosen(layout, options)
        file = work / f"{layout}.json"
        file.write_text(json.dumps([case.dump() for case in cases]))
        out, failed = ranks(LAYOUTS[layout][0], options, "equality", str(file), str(work))
        wrong += [f"{layout}: {failed}"] if failed else []
        done = [json.loads(line[5:]) for line in out.splitlines() if line.startswith("CASE ")]
        bad = {case[0]["name"]: found for case in done if (found := differs(case))}
        wrong += [f"{name}: other {', '.join(found)}" for name, found in bad.items()]
        shapes = ", ".join(dict.fromkeys(c.name.split(", ")[0].partition(" ")[2] for c in cases))
        count = str(LAYOUTS[layout][0])
        rows.append([f"{layout}: {shapes}", count, str(len(cases)), str(len(done) - len(bad))])
    columns = ("layout: models", "processes", "cases", "same bits as stock Megatron")
    return [Table("Equality", columns, rows)], wrong


def overhead(options: argparse.Namespace, work: Path) -> tuple[list[Table], list[str]]:
    """With one stage and with four: what schedules cost, and what activations take."""
    tables, wrong = [], []
    for stages in (1, 4):
        where = f"{stages} stage" + ("s, one process each" if stages > 1 else "")
        arguments = "overhead", str(stages), str(options.pairs), str(work)
        out, failed = ranks(stages, options, *arguments)
        if failed:
            wrong.append(f"{where}: {failed}")
            continue
        line = next(line for line in out.splitlines() if line.startswith("FOUND "))
        found = json.loads(line[6:])
        cells = [
            [
                row["arm"],
                f"{row['iteration_ms']:.1f}",
                f"{row['ratio']:.3f}",
                f"{row['us_per_op']:+.0f}",
                f"{row['cpu_us_per_op']:+.0f}",
                "yes" if row["identical"] else "NO",
            ]
            for row in found["overhead"]
        ]
        wrong += [f"{where}, {c[0]}: other parameters" for c in cells if c[-1] == "NO"]
        columns = ("schedule", "iteration, ms", "ratio", "more per op, us",
                   "of CPU, us", "same parameters")  # fmt: skip
        tables.append(Table(f"Overhead, {where}, {options.pairs} turns", columns, cells))
        if found["memory"]:
            tables.append(memory_table(found["memory"], options.cpu))
    return tables, wrong


def memory_table(rows: Sequence[dict[str, Any]], cpu: bool) -> Table:
    cells = [
        [
            row["plan"],
            f"{row['in_flight']:g}",
            f"{row['predicted'] / 2**20:.2f}",
            f"{row['measured'] / 2**20:.2f}",
            f"{row['measured'] / row['predicted']:.2f}",
        ]
        for row in rows
    ]
    who = "what autograd has saved" if cpu else "the allocator's peak"
    columns = ("plan, stage", "microbatches in flight", "predicted, MiB", "measured, MiB", "ratio")
    return Table(f"Peak of activations, measured: {who}", columns, cells)


def section(
    tables: Sequence[Table], wrong: Sequence[str], device: str, options: argparse.Namespace
) -> str:
    import torch

    words = " ".join(options.words)
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    versions = f"torch {torch.__version__}{cuda}, megatron-core {version('megatron-core')}"
    head = (
        f"`scripts/gpu_check.sh{' ' + words if words else ''}`, {datetime.date.today()}: {device}, "
        f"{versions}, Python {platform.python_version()}, {os.cpu_count()} CPU cores."
    )
    verdict = ["Nothing differed."] if not wrong else ["WRONG:", *(f"- {w}" for w in wrong)]
    body = "\n".join(markdown(table) for table in tables)
    return f"{HEADING}\n\n{head}\n\n{body}\n" + "\n".join(verdict) + "\n"


def replaced(page: str, new: str) -> str:
    """The page with this section in place of its own of before, or at its end."""
    before, found, after = page.partition(f"{HEADING}\n")
    _, more, rest = after.partition("\n## ") if found else ("", "", "")
    return f"{before.rstrip()}\n\n{new}" + (f"\n## {rest}" if more else "")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line."""
        self.exit(2, f"gpu_check: error: {message}; see --help\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="gpu_check.sh", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--cpu", action="store_true",
        help="a rehearsal on the CPU; prints, writes nothing")  # fmt: skip
    add("--quick", action="store_true", help="few cases of one layout, few turns")
    add("--layouts", metavar="NAMES", help=f"of {','.join(LAYOUTS)} (default: all)")
    add("--only", default=",".join(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)}")
    add("--pairs", type=int, metavar="N",
        help="turns of measuring overhead (default: 30, quick: 3)")  # fmt: skip
    add("--timeout", type=float, default=1800.0, help="seconds per set of ranks (default: 1800)")
    options = parser.parse_args(argv)
    options.words = sys.argv[1:] if argv is None else argv
    if options.layouts is None:
        options.layouts = "pp2" if options.quick else ",".join(LAYOUTS)
    if options.pairs is None:
        options.pairs = 3 if options.quick else 30
    for flag, known in (("layouts", LAYOUTS), ("only", PARTS)):
        names = getattr(options, flag).split(",")
        setattr(options, flag, names)
        for name in names:
            if name not in known:
                parser.error(f"--{flag} {name}: known are {', '.join(known)}")
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    import torch

    if not options.cpu and not torch.cuda.is_available():
        print(f"gpu_check: error: torch {torch.__version__} finds no CUDA GPU here; "
              "--cpu rehearses on the CPU", file=sys.stderr)  # fmt: skip
        return 2
    device = "the CPU, with stand-ins for CUDA" if options.cpu else torch.cuda.get_device_name(0)
    tables: list[Table] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="adaptra-gpu-") as work:
        for part in options.only:
            found, bad = {"equality": equality, "overhead": overhead}[part](options, Path(work))
            tables += found
            wrong += bad
    text = section(tables, wrong, device, options)
    if options.cpu:
        print(text, end="")
    else:
        PAGE.write_text(replaced(PAGE.read_text(), text))
        print(f"{PAGE.relative_to(ROOT)}: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
