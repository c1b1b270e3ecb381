#!/usr/bin/env python3
"""Do the unit tests notice random mistakes? Mutants by cosmic-ray, of what runs in one process.

    .venv/bin/python scripts/mutants.py --seed 1 --jobs 2    before a release: 300, in two hours
    .venv/bin/python scripts/mutants.py --only ir:20 --minutes 15

A mutant is a file with one operator, number or condition changed. Those test files of its package
run that are nearest to it by imports, until one of their tests fails: then it is killed, else it
has survived. Prints the score and every survivor's change; a survivor shows what no test looks
at, or code that does nothing. Needs `pip install cosmic-ray`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "release" / "faults")]

from faults import Copy, NotCaught, run_tests  # noqa: E402

PRODUCT = "megatron_adaptra"
# What is mutated below it, how many mutants of it, and the tests that have to notice.
PACKAGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ir": (70, ("tests/unit/ir",)),
    "model": (40, ("tests/unit/model", "tests/unit/plan")),
    "sim": (50, ("tests/unit/sim",)),
    "plan": (60, ("tests/unit/plan",)),
    "measure": (60, ("tests/unit/measure",)),
    "agree/agreement.py": (20, ("tests/unit/agree",)),
}
NEAREST = 4  # test files; more of them notice hardly more, and each takes its time
HANG = 120.0  # seconds of one test, and of what it waits for, on a busy machine
KILLED, SURVIVED, BROKEN = "killed", "survived", "could not run"


class Mutant(NamedTuple):
    """The change that an operator of cosmic-ray makes at one of the places where it can."""

    package: str
    path: Path  # below ROOT
    operator: str
    occurrence: int
    place: tuple[int, int]


def mutants_of(package: str) -> Iterator[Mutant]:
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    place = ROOT / PRODUCT / package
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        nodes, lines = list(ast_nodes(get_ast_from_path(path))), path.read_text().split("\n")
        for name in operator_names():
            # Types, which are comments at run time, are joined by |; floats have no bits.
            if get_operator(name).arguments() or "Bit" in name or "Shift" in name:
                continue
            operator = get_operator(name)()
            places = [at for node in nodes for at, _ in operator.mutation_positions(node)]
            for occurrence, at in enumerate(places):
                if "cache" not in lines[at[0] - 1]:  # without one it is slower
                    yield Mutant(package, path.relative_to(ROOT), name, occurrence, at)


def drawn(package: str, count: int, seed: int) -> list[Mutant]:
    """Of so many places one mutant each: else most would be other operators for a +."""
    by_place: dict[tuple[Path, tuple[int, int]], list[Mutant]] = {}
    for mutant in mutants_of(package):
        by_place.setdefault((mutant.path, mutant.place), []).append(mutant)
    rng = random.Random(f"{seed} {package}")
    places = rng.sample(sorted(by_place), min(count, len(by_place)))
    return [rng.choice(by_place[place]) for place in places]


def text_of(mutant: Mutant) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    operator = get_operator(mutant.operator)()
    return str(mutate_code((ROOT / mutant.path).read_text(), operator, mutant.occurrence))


# --- which tests ---------------------------------------------------------------------------------


def file_of(module: str) -> Path | None:
    """The file of a module of the product or of what tests import from each other."""
    for folder in (
        ROOT,
        *(ROOT / "tests" / p for p in ("support", "unit", "unit/ir", "unit/plan")),
    ):
        path = folder / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@cache
def imports(path: Path) -> frozenset[Path]:
    """Files that one imports by name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return frozenset(file for name in names if (file := file_of(name)) is not None)


@cache
def distance(test: Path, path: Path) -> int | None:
    """Over how many imports a test reaches a file."""
    seen, queue = {test: 0}, deque([test])
    while queue:
        at = queue.popleft()
        if at == path:
            return seen[at]
        for other in sorted(imports(at) - seen.keys()):
            seen[other] = seen[at] + 1
            queue.append(other)
    return None


def nearest(mutant: Mutant) -> list[str]:
    files = [
        file
        for place in PACKAGES[mutant.package][1]
        for file in sorted((ROOT / place).rglob("test_*.py"))
    ]
    away = {file: distance(file, ROOT / mutant.path) for file in files}
    reaching = sorted((n, str(f.relative_to(ROOT))) for f, n in away.items() if n is not None)
    return [file for _, file in reaching[:NEAREST]]


# --- what becomes of them ------------------------------------------------------------------------


_copy: Copy  # of the checkout: this worker's own


def begin_worker(folder: Path) -> None:
    """A process each: what a run of tests leaves behind is ended, and would be another thread's."""
    global _copy
    (place := folder / str(os.getpid())).mkdir()
    _copy = Copy.of_checkout(place)


def outcome(mutant: Mutant, end: float) -> str | None:
    """Run the nearest tests on a mutant; None where the monotonic clock is past `end`."""
    if time.monotonic() > end:
        return None
    words = ["--quick", *nearest(mutant)]
    try:
        text = text_of(mutant)
        compile(text, str(mutant.path), "exec")
        with _copy.changed(_copy.folder / mutant.path, text):
            failed, _ = run_tests(_copy, words, HANG)
    except (NotCaught, SyntaxError) as error:
        print(f"{mutant.path}, {mutant.operator}: {error}", file=sys.stderr, flush=True)
        return BROKEN
    return KILLED if failed else SURVIVED


def judged(
    mutants: Sequence[Mutant], jobs: int, minutes: float
) -> Iterator[tuple[Mutant, str | None]]:
    """What becomes of each; None of those for which there was no time."""
    judge = partial(outcome, end=time.monotonic() + 60 * minutes)
    with tempfile.TemporaryDirectory(prefix="adaptra-mutants-") as folder:
        place = Path(folder).resolve()
        with ProcessPoolExecutor(jobs, initializer=begin_worker, initargs=(place,)) as pool:
            yield from zip(mutants, pool.map(judge, mutants), strict=True)


def diff(mutant: Mutant) -> str:
    before, after = (ROOT / mutant.path).read_text(), text_of(mutant)
    rows = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=0)
    changed = [row for row in rows if not row.startswith(("---", "+++"))]
    return "\n".join([f"{mutant.path}: {mutant.operator}", *changed])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), metavar="N")
    parser.add_argument(
        "--only", action="append", metavar="PACKAGE[:COUNT]", help=f"of {', '.join(PACKAGES)}"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (1)")
    parser.add_argument(
        "--minutes", type=float, default=600.0, metavar="N", help="begin no mutant after these"
    )
    options = parser.parse_args()
    asked = {package: count for package, (count, _) in PACKAGES.items()}
    if options.only:
        words = dict(word.partition(":")[::2] for word in options.only)
        if unknown := words.keys() - PACKAGES.keys():
            parser.error(f"--only {', '.join(unknown)}: there are {', '.join(PACKAGES)}")
        asked = {package: int(count or asked[package]) for package, count in words.items()}
    print(f"seed {options.seed}", flush=True)
    chosen: list[Mutant] = []
    for package, count in asked.items():
        chosen += drawn(package, count, options.seed)
    random.Random(options.seed).shuffle(chosen)  # those for which there is time are of all packages
    found: dict[str, Counter[str]] = {package: Counter() for package in asked}
    for number, (mutant, what) in enumerate(judged(chosen, options.jobs, options.minutes), 1):
        if what is None:
            continue
        found[mutant.package][what] += 1
        print(f"{number} of {len(chosen)}: {what}", file=sys.stderr, flush=True)
        if what == SURVIVED:
            print(f"\n{diff(mutant)}", flush=True)
    print(f"\n| package | mutants | {KILLED} | {SURVIVED} | {BROKEN} |\n|---|---:|---:|---:|---:|")
    for package, each in found.items():
        row = (each.total(), each[KILLED], each[SURVIVED], each[BROKEN])
        print(f"| {package} | {' | '.join(map(str, row))} |")
    total: Counter[str] = sum(found.values(), Counter())
    tried = total[KILLED] + total[SURVIVED]
    print(f"\n{total[KILLED]} of {tried} killed: {total[KILLED] / max(1, tried):.0%}")
    return 0


if __name__ == "__main__":
    if find_spec("cosmic_ray") is None:
        sys.exit("adaptra: there is no cosmic-ray: pip install cosmic-ray")
    sys.exit(main())
