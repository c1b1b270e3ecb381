#!/usr/bin/env python3
"""Which collectives of an iteration cross stages outside the pipeline: found by watching it train.

Prints a table for each Megatron-LM checkout or script, as docs/iteration-end.md has them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lm_process import ENVIRONMENT, execute
from megatron_lm_rows import FLAGS

from megatron_adaptra.base.processes import become_subreaper

ENTRY = Path(__file__).with_name("iteration_end_entry.py")
STAGES, ITERATIONS = 4, 6
FROM = 2  # the first iterations set things up


def watch(script: Path, python: str, *flags: str) -> list[dict[str, Any]]:
    """One dict per operation that crosses stages, in the order of its first use."""
    with tempfile.TemporaryDirectory(prefix="adaptra-end-") as folder:
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(STAGES), "-m", "megatron_adaptra.run", str(ENTRY), str(script), *FLAGS]
        sizes = {
            "--pipeline-model-parallel-size": STAGES, "--num-layers": STAGES,
            "--global-batch-size": 4, "--train-iters": ITERATIONS,
        }  # fmt: skip
        command += [str(word) for item in sizes.items() for word in item] + list(flags)
        log = Path(folder) / "log"
        # A wheel's Megatron is on the caller's path; a checkout's comes first anyway.
        paths = [ENVIRONMENT["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
        environment = {
            **ENVIRONMENT,
            "ADAPTRA_RECORDS": folder,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        status = execute(command, log, Path(folder), 240, environment)
        if status != 0:
            raise RuntimeError(f"{script} ended with {status}\n{log.read_text()[-3000:]}")
        return _crossing([json.loads(p.read_text()) for p in Path(folder).glob("rank*.json")])


def _crossing(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """With one rank per stage every group of two or more crosses stages."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    most: Counter[tuple[str, ...]] = Counter()
    for notes in ranks:
        times: Counter[tuple[str, ...]] = Counter()
        for note in notes:
            if note["iteration"] < FROM or note["iteration"] >= ITERATIONS - 1:
                continue
            if len(note["ranks"]) < 2:
                continue
            key = (note["place"], note["function"], note["op"], note["type"])
            times[key] += 1
            found.setdefault(key, note)
        for key, count in times.items():
            most[key] = max(most[key], count)
    return [
        {
            "place": note["place"], "function": note["function"], "op": note["op"],
            "elements": note["elements"], "type": note["type"], "ranks": len(note["ranks"]),
            "per iteration": most[key] / (ITERATIONS - 1 - FROM),
        }
        for key, note in found.items()
    ]  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| where | operation | elements | ranks | per iteration |", "|---|---|---|---|---|"]
    for row in rows:
        what = " ".join(word for word in (row["function"], row["op"], row["type"]) if word)
        lines.append(
            f"| `{row['place']}` | {what} | {row['elements']} | {row['ranks']} | "
            f"{row['per iteration']:g} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("scripts", nargs="+", type=Path, metavar="SCRIPT",
        help="a checkout, or a training script")  # fmt: skip
    parser.add_argument("--python", default=sys.executable, help="(default: this one)")
    options = parser.parse_args()
    become_subreaper()
    for path in options.scripts:
        script = path / "pretrain_gpt.py" if path.is_dir() else path
        print(f"## {path.name}\n\n{table(watch(script.resolve(), options.python))}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
