#!/usr/bin/env python3
"""Train pretrain_gpt.py of Megatron-LM checkouts, stock and with --adaptra, and compare.

scripts/test_megatron_lm.sh makes the environments and calls it. Every run is the checkout's own
script on CPUs and gloo. A row passes if both runs end with status 0, all printed losses and
gradient norms are equal, the saved parameters and optimizer states are equal by SHA-256, the loss
falls, the plugin ran in one run and was absent from the other, and the one over a slow link was
faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from make_patches import Refused, release
from megatron_lm_process import (
    DIGESTS,
    ROOT,
    build_helpers,
    environment,
    execute,
    execute_in_netlab,
    why,
)
from megatron_lm_rows import (
    ALL_SHAPES,
    FLAGS,
    ROWS,
    Outcome,
    Row,
    Run,
    notes,
    plugin_faults,
    pythons_for,
    rows,
)

from megatron_adaptra.base.processes import become_subreaper


class Checkout:
    """A Megatron-LM checkout, the Python that runs it, and the runs of it so far."""

    def __init__(self, path: Path, pythons: dict[str, str], work: Path, options: Any) -> None:
        self.path, self.options, self.work = path, options, work
        self.release = release(path)[:2]
        self.version = ".".join(map(str, self.release))
        fits = pythons_for(self.release)
        self.python = next((pythons[v] for v in fits if v in pythons), "")
        self.why_not = "" if self.python else f"needs Python {' or '.join(fits)}: --python X.Y=..."
        self.tools = work / f"{path.name}-tools"
        self.environment = environment(self.python, self.tools) if self.python else {}
        self.outcomes: dict[Run, Outcome] = {}
        self.digests: dict[Path, dict[str, str]] = {}

    def git(self, *words: str) -> str:
        command = ["git", "-C", str(self.path), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def train(self, run: Run, script: Path) -> Outcome:
        """Train, unless an earlier row has done the same."""
        if run in self.outcomes:
            return self.outcomes[run]
        folder = self.work / f"{self.path.name}-{len(self.outcomes)}"
        folder.mkdir()
        shape, options = ALL_SHAPES[run.shape], self.options
        done = Outcome(folder / "log", folder / "checkpoint")
        ranks = shape.pipeline * shape.tensor * shape.data
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [self.python, *([] if run.network else launcher)]
        command += [] if run.patched else ["-m", "megatron_adaptra.run"]
        command += [str(script), *FLAGS, *shape.words(self.release, options.microbatches)]
        command += ["--train-iters", str(options.iterations), "--save", str(done.checkpoint)]
        command += ["--save-interval", str(options.iterations), *run.plugin]
        if run.network:
            done.status = execute_in_netlab(
                command, done.log, ranks, run.network, options.timeout, self.environment
            )
        else:
            done.status = execute(command, done.log, folder, options.timeout, self.environment)
        done.read()
        self.outcomes[run] = done
        return done

    def digest(self, faults: list[str], *outcomes: Outcome) -> list[dict[str, str]]:
        """SHA-256 of every saved file's parameters and optimizer state, by the file's name."""
        new = [done for done in outcomes if done.checkpoint not in self.digests]
        if new:
            out = new[-1].log.with_name("digests")
            command = [self.python, DIGESTS, str(self.path), *(str(x.checkpoint) for x in new)]
            status = execute(command, out, out.parent, 120, self.environment)
            output = out.read_text(errors="replace").strip()
            if status != 0:
                faults.append(f"reading the checkpoints ended with {status}: {why(output)}")
                return [{} for _ in outcomes]
            found = json.loads(output.splitlines()[-1])
            for done, digests in zip(new, found, strict=True):
                self.digests[done.checkpoint] = digests
                if digests and not self.options.keep:
                    shutil.rmtree(done.checkpoint)
        return [self.digests[done.checkpoint] for done in outcomes]

    def results(self) -> list[dict[str, Any]]:
        """All rows, or one line with the reason why this checkout cannot be tried."""
        o = self.options
        wanted = rows(o.only, o.slow_link.split(","), o.delay, o.netlab)
        if not self.why_not and (fault := build_helpers(self.path, self.environment, self.tools)):
            self.why_not = f"has helpers that cannot be compiled: {fault}"
        if self.why_not:
            print(f"{self.path.name}: left out, it {self.why_not}", file=sys.stderr)
            return []
        before = self.git("status", "--porcelain")
        found = []
        for row in wanted:
            print(f"{self.path.name}: {row.name} ...", end=" ", file=sys.stderr, flush=True)
            found.append(self.compare(row))
            ended = "; ".join(found[-1]["faults"])
            print(f"FAILED: {ended}" if ended else "passed", file=sys.stderr, flush=True)
        if self.git("status", "--porcelain") != before:
            raise RuntimeError(f"{self.path}: the runs have left files in the checkout")
        return found

    def compare(self, row: Row) -> dict[str, Any]:
        """Run both sides of a row and judge them."""
        faults: list[str] = []
        script = self.path / "pretrain_gpt.py"
        stock = self.train(row.stock, script)
        if row.adaptra.patched:
            with patched_copy(self.path, self.work, faults) as copy:
                ours = self.train(row.adaptra, copy / "pretrain_gpt.py")
        else:
            ours = self.train(row.adaptra, script)
        for side, done in (("stock", stock), ("adaptra", ours)):
            if done.status != 0:
                faults.append(f"{side} ended with {done.status}: {why(done.text)}")
            elif len(done.printed) != self.options.iterations:
                faults.append(f"{side} logged {len(done.printed)} iterations")
            elif not float(done.printed[-1][0]) < float(done.printed[0][0]):
                faults.append(f"the loss of {side} did not fall")
        losses = stock.printed == ours.printed if stock.printed and ours.printed else None
        ratio = stock.milliseconds() / ours.milliseconds()
        parameters: bool | None = None  # not compared
        if not faults:
            mine, theirs = self.digest(faults, stock, ours)
            if not faults:
                parameters = bool(mine) and mine == theirs
                faults += [] if parameters else ["parameters differ"]
            faults += [] if ratio >= row.least_ratio else [f"won less than {row.least_ratio:g} x"]
            faults += plugin_faults(row, stock, ours)
        faults += ["losses or gradient norms differ"] if losses is False else []
        return {
            "checkout": self.path.name, "release": self.version, "run": row.name,
            "commit": self.git("rev-parse", "HEAD").strip(),
            "stock_ms": _rounded(stock.milliseconds()), "adaptra_ms": _rounded(ours.milliseconds()),
            "ratio": _rounded(ratio), "losses_identical": losses,
            "parameters_identical": parameters, "first_loss": stock.printed[:1],
            "last_loss": stock.printed[-1:], "faults": faults, "passed": not faults,
            "notes": notes(ours.text),
            "logs": [] if not faults else [str(stock.log), str(ours.log)],
            "telling": "" if not faults else (ours if stock.status == 0 else stock).telling_lines(),
        }  # fmt: skip


@contextlib.contextmanager
def patched_copy(checkout: Path, work: Path, faults: list[str]) -> Iterator[Path]:
    """A clone with our patch in it; afterwards the patch is taken out, and no trace is left."""
    copy = work / f"{checkout.name}-patched"
    quiet = ["-c", "advice.detachedHead=false", "clone", "--quiet", "--shared"]
    subprocess.run(["git", *quiet, str(checkout), str(copy)], check=True, timeout=120)
    helpers = "megatron/core/datasets"
    for built in (checkout / helpers).glob("helpers_cpp*.so"):
        shutil.copy(built, copy / helpers)

    def patch(*words: str, expect: str) -> None:
        command = [str(ROOT / "scripts/apply_patches.sh"), str(copy), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0 or not done.stdout.startswith(expect):
            output = (done.stderr or done.stdout).strip()
            faults.append(f"apply_patches.sh {' '.join(words)}: {done.returncode}, {output}")

    patch("--check", expect="not patched, the patch fits")
    patch(expect="patched")
    patch("--check", expect="patched")
    once = (copy / "pretrain_gpt.py").read_bytes()
    patch(expect="already patched")
    if (copy / "pretrain_gpt.py").read_bytes() != once:
        faults.append("patching twice changed the file again")
    yield copy
    patch("--revert", expect="taken out")
    status = ["git", "-C", str(copy), "status", "--porcelain"]
    if left := subprocess.run(status, capture_output=True, text=True, check=True).stdout:
        faults.append(f"after --revert git status says {left.strip()!r}")
    shutil.rmtree(copy)


def _rounded(value: float) -> float | None:
    return round(value, 2) if value == value else None  # JSON has no NaN


def table(results: Sequence[dict[str, Any]]) -> str:
    """Plain text: it goes into a document as it is."""
    head = ("checkout", "run", "stock ms", "adaptra ms", "ratio", "losses", "parameters", "result")
    lines = [head]
    for r in results:
        words = [_IDENTICAL[r[k]] for k in ("losses_identical", "parameters_identical")]
        figures = ["-", "-", "-"]
        if r["ratio"] is not None:
            figures = [f"{r['stock_ms']:.0f}", f"{r['adaptra_ms']:.0f}", f"{r['ratio']:.2f}"]
        result = "passed" if r["passed"] else "FAILED: " + "; ".join(r["faults"])
        lines.append((r["checkout"], r["run"], *figures, *words, result))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    return "\n".join(
        "  ".join([c.ljust(w) for c, w in zip(line, widths, strict=False)] + [line[-1]])
        for line in lines
    )


_IDENTICAL = {True: "identical", False: "DIFFER", None: "-"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("checkouts", metavar="CHECKOUT", nargs="+", type=Path, help="folder of a Megatron-LM")
    add("--only", metavar="ROW,...", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    add("--iterations", type=int, default=20)
    add("--microbatches", type=int, default=12)
    add("--delay", default="40ms", help="of a slow link, each way (default: 40ms)")
    add("--slow-link", default="2-3", help="0-1, 1-2, 2-3, or several (default: 2-3)")
    add("--timeout", type=float, default=240, help="seconds that one training may take")
    add("--json", type=Path, metavar="FILE", help="write all results there")
    add("--keep", type=Path, metavar="DIR", help="keep logs and checkpoints there")
    add("--no-patch", action="store_true", help="leave out the row `patched`")
    add("--netlab", action="store_true", help="really slow links in the row `slow`; needs root")
    add("--python", action="append", default=[], metavar="X.Y=PYTHON",
        help="the Python for checkouts that need X.Y (default: this one)")  # fmt: skip
    options = parser.parse_args(argv)
    options.only = [name for name in options.only.split(",") if name]
    for name in options.only:
        if name not in ROWS:
            parser.error(f"--only {name}: there is no such row; known are {', '.join(ROWS)}")
    if options.no_patch:
        options.only = [name for name in options.only if name != "patched"]
    for path in options.checkouts:
        if not (path / "pretrain_gpt.py").is_file():
            parser.error(f"{path}: it has to be a Megatron-LM checkout, with pretrain_gpt.py")
        try:
            release(path)
        except Refused as error:
            parser.error(str(error))
        if "patched" in options.only and not (path / ".git").exists():
            parser.error(
                f"{path}: the row `patched` clones it, and git does not know it; --no-patch"
            )
    if options.iterations < 12 or options.microbatches < 4:
        parser.error("at least 12 --iterations and 4 --microbatches: a plan needs time to come")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    mine = ".".join(map(str, sys.version_info[:2]))
    pythons = {mine: sys.executable, **dict(word.split("=", 1) for word in options.python)}
    become_subreaper()
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    left_out = 0
    # A SIGTERM waits until the folder will be removed, then does what a Ctrl-C does.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    work = Path(tempfile.mkdtemp(prefix="adaptra-megatron-lm-", dir=options.keep)).resolve()
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for path in options.checkouts:
            checkout = Checkout(path.resolve(), pythons, work, options)
            results += checkout.results()
            left_out += bool(checkout.why_not)
    except (KeyboardInterrupt, SystemExit) as error:
        print("interrupted", file=sys.stderr)
        results.clear()
        return 143 if isinstance(error, SystemExit) else 130
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # once is enough
            signal.signal(number, signal.SIG_IGN)
        if options.json and results:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
        if not options.keep:
            _tidy(work, {Path(log).parent for r in results for log in r["logs"]})
    print(table(results))
    for r in results:
        if not r["passed"]:
            print(f"\n{r['checkout']} {r['run']}: logs {' '.join(r['logs'])}\n{r['telling']}")
    return 0 if results and not left_out and all(r["passed"] for r in results) else 1


def _tidy(work: Path, failed: set[Path]) -> None:
    """Leave the logs of what failed, and nothing else."""
    for folder in work.iterdir():
        shutil.rmtree(folder / "checkpoint" if folder in failed else folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not empty
        work.rmdir()


if __name__ == "__main__":
    sys.exit(main())
