"""Features of Megatron with remedies, and with each other.

A case ends with stock Megatron's bits, or with the mean that its remedy promises, on stock's
samples. It never hangs, dies, or differs otherwise; what is not done has a line that says why.
"""

from __future__ import annotations

import functools
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from interactions import ALIKE, FEATURES, FIXED, HOME, REMEDIES, SHAPES, Case, chosen, met
from patience import PATIENCE
from running import zygote
from trainings import (
    HAS_TRAINING,
    SCRIPT,
    Done,
    auxiliary,
    close,
    digests,
    needs_training,
    words_of,
)

MOVED = re.compile(r"adaptra: from iteration \d+ on, (?:.* run on |replicas run )")
CHANGED = re.compile(r"adaptra: from iteration (\d+) on, ")
STANDS = re.compile(r"^STANDS (.*)$", re.MULTILINE)

pytestmark = [needs_training, pytest.mark.long, pytest.mark.timeout(3600)]


@functools.cache
def beside() -> ThreadPoolExecutor:
    """For stock's trainings. Its thread lives as long as this process: a zygote dies with the
    thread that has started it."""
    return ThreadPoolExecutor(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = chosen(metafunc.config.getoption("--full")) if HAS_TRAINING else []
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def run(folder: Path, case: Case, ours: bool) -> Done:
    """One training."""
    (samples := folder / "samples").mkdir(parents=True)
    flags = case.ours if ours else case.stock
    flags = [*flags, "--user-samples", str(samples)]
    if "--save-interval" in flags:
        flags += ["--save", str(folder / "saved")]
    words = words_of(folder, case.shape.ranks, *flags, iterations=case.iterations)
    words[0] = str(SCRIPT.with_name("interactions_pretrain.py"))
    ended = zygote(ours).run(
        folder, words, ranks=case.shape.ranks, timeout=5 * PATIENCE, ends=False,
        environment={"HANGS_AFTER": str(PATIENCE)},
    )  # fmt: skip
    stands = [STANDS.search(text) for text in ended.texts]
    if not any(stands):
        return Done(ended.status, ended.text)
    where = (f"rank {rank}: {found[1] if found else '?'}" for rank, found in enumerate(stands))
    return Done("hangs", "\n".join(["HANGS " + "; ".join(where), ended.text]))


def trained_on(folder: Path) -> set[tuple[str, ...]]:
    """Whether it trained or evaluated, in which iteration, and a sample."""
    return {
        (kind, iteration, sample)
        for path in (folder / "samples").iterdir()
        for kind, iteration, *numbers in map(str.split, path.read_text().splitlines())
        for sample in numbers
    }


def saved(folder: Path) -> tuple[dict[str, str], set[str]]:
    """Digests of checkpoints of format torch, and the folders of all."""
    where = folder / "saved"
    folders = {str(path.relative_to(where)) for path in where.rglob("*") if path.is_dir()}
    return digests(folder) if any(where.glob("*/mp_rank*")) else {}, folders


def remarks(done: Done) -> list[str]:
    """Lines of the plugin that are no decisions: what it leaves to Megatron, and why."""
    lines = re.findall(r"^adaptra: (.*)", done.text, re.MULTILINE)
    return [line for line in lines if not line.startswith("from iteration ")]


def parameters(done: Done) -> list[str]:
    return re.findall(r"^parameters: (\w+)", done.text, re.MULTILINE)


def ending(case: Case, ours: Done, stock: Done, folders: tuple[Path, Path]) -> str:
    """In words; begins with WRONG where a case must not end so."""
    if ours.status == "hangs":
        return f"WRONG: {ours.text.splitlines()[0]}"
    if ours.status != 0:
        return f"WRONG: ends with status {ours.status}: {ours.error}"
    mine, theirs = map(trained_on, folders)
    if mine != theirs:
        more, less = sorted(mine - theirs), sorted(theirs - mine)
        return f"WRONG: {len(more)} samples that stock does not train, {more[:3]}, not {less[:3]}"
    repeated = {line for line in remarks(ours) if remarks(ours).count(line) > 1}
    if repeated:
        return f"WRONG: says it again and again: {repeated}"
    left = "".join(f"; {line}" for line in remarks(ours))
    at = CHANGED.findall(ours.text)
    changes = f", changed in iteration {', '.join(at)}" if at else ""
    found = [(one.numbers, one.evaluated, auxiliary(one), parameters(one)) for one in (ours, stock)]
    kept = [saved(folder) for folder in folders]
    other = sorted(kept[0][1] ^ kept[1][1])
    wrong = f"WRONG: other folders are saved: {other}; " if other else ""
    where = folders[0] / "saved"
    if any(plan.parent.parent != where for plan in where.rglob("adaptra-replica*.json")):
        return f"WRONG: a plan is saved beside what Megatron soon deletes{changes}{left}"
    if found[0] == found[1] and kept[0][0] == kept[1][0]:
        return f"{wrong}stock's bits{changes}{left}"
    summed = "--adaptra-allreduce" in case.ours and case.shape.replicas > 2
    if not MOVED.search(ours.text) and not summed:
        return f"WRONG: {first_difference(ours, stock)}{changes}{left}"
    try:
        # Weights of 16 bits are rounded by more: sums in another order show sooner.
        close(ours, stock, 10.0 if {"--bf16", "--fp16"} & {*case.stock} else 1.0)
    except AssertionError as error:
        return f"WRONG: no mean of stock's: {first_difference(ours, stock)} {error}{changes}{left}"
    return f"{wrong}stock's mean{changes}{left}"


def first_difference(ours: Done, stock: Done) -> str:
    for mine, theirs in zip(ours.numbers, stock.numbers, strict=False):
        if mine != theirs:
            return f"iteration {mine[0]} is {mine[3:]}, of stock {theirs[3:]}"
    pairs = {
        "evaluations": [one.evaluated for one in (ours, stock)],
        "balancing losses": [auxiliary(one) for one in (ours, stock)],
        "iterations": [len(one.numbers) for one in (ours, stock)],
        "parameters": [parameters(one) for one in (ours, stock)],
    }
    return next((f"other {name}" for name, (a, b) in pairs.items() if a != b), "other checkpoints")


def test_a_case_ends_as_stock_does(
    case: Case, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    folders = tmp_path / "ours", tmp_path / "stock"
    other = beside().submit(run, folders[1], case, False)
    ours, stock = run(folders[0], case, True), other.result()
    assert stock.status == 0, stock.text[-4000:]
    assert stock.numbers, stock.text[-4000:]
    how = ending(case, ours, stock, folders)
    record_property("ending", f"{case.name} | {how}")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    assert not how.startswith("WRONG"), f"{how}\n{ours.text[-6000:]}\n{' '.join(case.ours)}"


def test_all_values_are_trained() -> None:
    cases = chosen(False)
    assert {case.row["remedy"] for case in cases} == set(REMEDIES) - set(FIXED)
    assert {case.row["shape"] for case in cases} == set(SHAPES)
    for home in (True, False):
        some = [case.row for case in cases if (case.row["remedy"] in HOME) == home]
        for axis, values in FEATURES.items():  # those saves go with one remedy alone
            alike = set() if home else {value for _, value in ALIKE}
            assert {row[axis] for row in some} >= set(values) - {"non-persistent saves", *alike}
    moving = [case.row for case in cases if ("refused", case.row["remedy"]) not in met(case.row)]
    assert {row["remedy"] for row in moving} == set(REMEDIES) - set(FIXED)
