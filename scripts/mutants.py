#!/usr/bin/env python3
"""Do the unit tests notice random mistakes? Mutants by cosmic-ray, of what runs in one process.

    .venv/bin/python scripts/mutants.py --seed 1        before a release: 300, in an hour
    .venv/bin/python scripts/mutants.py --only ir:20    some of one package

A mutant is the package with one operator, number or condition changed. It is killed if a test of
its package fails, and has survived if none does. Prints the score and every survivor's change; a
survivor shows what no test looks at, or code that does nothing. Needs `pip install cosmic-ray`.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "faults")]

from faults import Copy  # noqa: E402

# What is mutated below megatron_adaptra, how many mutants of it, and the tests that have to notice.
PACKAGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ir": (70, ("tests/ir",)),
    "model": (40, ("tests/model", "tests/plan/test_warmup.py", "tests/plan/test_adaptive.py")),
    "sim": (50, ("tests/sim",)),
    "plan": (60, ("tests/plan",)),
    "telemetry": (60, ("tests/telemetry",)),
    "runtime/ballot.py": (
        20, ("tests/runtime/test_ballot.py", "tests/runtime/test_agreement.py",
             "tests/runtime/test_refusal.py"),
    ),
}  # fmt: skip
LIMIT = 300.0  # seconds of one mutant's tests; a mutant that hangs is killed
# Changes of types, which are comments at run time.
IN_TYPES = "%BinaryOperator_BitOr%"
CONFIG = """
[cosmic-ray]
module-path = "megatron_adaptra/{package}"
timeout = {limit}
excluded-modules = []
test-command = "{python} -m pytest -x -q --quick -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def mutated(package: str, count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """By outcome, how many of `count` mutants of a `package`; and the survivors' changes."""
    Copy.of_checkout(folder)
    tests = " ".join(PACKAGES[package][1])
    settings = CONFIG.format(package=package, limit=LIMIT, python=sys.executable, tests=tests)
    (folder / "mutants.toml").write_text(settings)

    def cosmic_ray(command: str) -> None:
        words = [sys.executable, "-m", "cosmic_ray.cli", command, "mutants.toml"]
        if command != "baseline":
            words.append("mutants.sqlite")
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)

    cosmic_ray("init")
    cosmic_ray("baseline")  # fails unless the tests pass without a mutant
    session = sqlite3.connect(folder / "mutants.sqlite")
    jobs = [
        job for (job,) in session.execute(
            "SELECT job_id FROM mutation_specs WHERE operator_name NOT LIKE ? ORDER BY "
            "module_path, start_pos_row, start_pos_col, operator_name, occurrence", (IN_TYPES,),
        )
    ]  # fmt: skip
    chosen = set(random.Random(f"{seed} {package}").sample(jobs, min(count, len(jobs))))
    for table in ("mutation_specs", "work_items"):
        for (job,) in session.execute(f"SELECT job_id FROM {table}").fetchall():
            if job not in chosen:
                session.execute(f"DELETE FROM {table} WHERE job_id = ?", (job,))
    session.commit()
    cosmic_ray("exec")
    rows = session.execute("SELECT test_outcome, diff FROM work_results").fetchall()
    outcomes = Counter(str(outcome).rpartition(".")[2].lower() for outcome, _ in rows)
    return outcomes, [
        str(diff) for outcome, diff in rows if str(outcome).lower().endswith("survived")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), metavar="N")
    parser.add_argument(
        "--only", action="append", metavar="PACKAGE[:COUNT]", help=f"of {', '.join(PACKAGES)}"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="packages at a time (2)")
    options = parser.parse_args()
    asked = {package: count for package, (count, _) in PACKAGES.items()}
    if options.only:
        words = dict(word.partition(":")[::2] for word in options.only)
        if unknown := words.keys() - PACKAGES.keys():
            parser.error(f"--only {', '.join(unknown)}: there are {', '.join(PACKAGES)}")
        asked = {package: int(count or asked[package]) for package, count in words.items()}
    print(f"seed {options.seed}", flush=True)
    total, survivors = Counter[str](), list[str]()
    print("| package | mutants | killed | survived | could not run |\n|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="adaptra-mutants-") as folder:
        with ThreadPoolExecutor(options.jobs) as pool:
            made = {}
            for number, (package, count) in enumerate(asked.items()):
                (place := Path(folder).resolve() / str(number)).mkdir()
                made[package] = pool.submit(mutated, package, count, options.seed, place)
            for package, result in made.items():
                found, alive = result.result()
                total += found
                survivors += alive
                row = (found.total(), found["killed"], found["survived"], found["incompetent"])
                print(f"| {package} | {' | '.join(map(str, row))} |", flush=True)
    tried = total["killed"] + total["survived"]
    print(f"\n{total['killed']} of {tried} killed: {total['killed'] / max(1, tried):.0%}\n")
    print("\n".join(survivors))
    return 0


if __name__ == "__main__":
    if find_spec("cosmic_ray") is None:
        sys.exit("adaptra: there is no cosmic-ray: pip install cosmic-ray")
    sys.exit(main())
