"""The law: nothing that adapts a training ends it, or changes a bit of it.

Where it could is found by looking at trainings (law.py says by which rule): of one pipeline, of
replicas that have one plan, and of replicas that share an iteration out. Then calls of it raise,
hang or return nonsense, on one rank or on all, from the start or in the middle, and the training
ends with the bits of stock Megatron; under shares with its losses, up to the order of sums.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from law import KINDS, Site
from patience import in_time
from running import zygote
from trainings import HAS_TRAINING, Done, digests, needs_training, stock, words_of

SCRIPT = Path(__file__).parent / "ranks" / "law_script.py"
PRETRAIN = SCRIPT.with_name("law_pretrain.py")
ITERATIONS = 20  # of Megatron's own program
# Ranks of a job, and how many jobs share the cases: most of their time they wait for what is slow.
JOBS = {"pipeline": (2, 3), "replicas": (4, 2), "shares": (2, 2)}
ADAPTED = {"replicas": "swapped", "shares": "(6, 2)"}  # in the plan of a training without a fault
TRIES = 5
Case = dict[str, Any]
Row = tuple[str, list[str], list[int]]

each_job = pytest.mark.parametrize(
    "job", ["pipeline", *(pytest.param(job, marks=pytest.mark.long) for job in ADAPTED)]
)


def run(cases: list[Case] | None, job: str) -> list[list[str]]:
    """What each rank has printed, job after job; without cases, where calls could fail."""
    ranks, jobs = JOBS[job]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps(cases))
        words = [str(SCRIPT), "" if cases is None else str(path), folder, job]
        ranks *= 1 if cases is None else jobs
        done = zygote(False).run(Path(folder), words, ranks=ranks, timeout=1800, ends=False)
    return [list(filter(None, text.splitlines())) for text in done.texts]


@functools.cache
def found(job: str) -> list[list[dict[str, Any]]]:
    """By engine, what each rank has found.

    On a busy machine a training may end before anything is adapted, and is then tried again.
    """
    for _ in range(TRIES):
        lines = run(None, job)
        by_rank = [[json.loads(one[6:]) for one in text if one[:6] == "FOUND "] for text in lines]
        assert all("DONE" in text for text in lines), [text[-25:] for text in lines]
        by_engine = [list(rows) for rows in zip(*by_rank, strict=True)]
        if adapted(by_engine, job):
            break
    return by_engine


def adapted(by_engine: list[list[dict[str, Any]]], job: str) -> bool:
    return any(ADAPTED.get(job, "") in one["plan"] for rows in by_engine for one in rows)


def sites(job: str) -> Iterator[Row]:
    """The engine under which it is called, the site, and how often each rank has called it.

    Of replicas only functions that one pipeline does not call.
    """
    known = set[str]()
    others = set() if job == "pipeline" else {site[1] for _, site, _ in sites("pipeline")}
    for rows in reversed(found(job)):  # native first: it plans less
        counts = [row["calls"] for row in rows]
        for name in sorted(set().union(*counts) - known):
            known.add(name)
            if (site := json.loads(name))[1] not in others:
                yield rows[0]["engine"], site, [count.get(name, 0) for count in counts]


def few(job: str) -> Iterator[Row]:
    """Each function that a pipeline calls, once, from one of its callers; of what replicas call
    besides, and of what threads call, one of each module."""
    modules: dict[tuple[bool, str], dict[str, Row]] = {}
    for row in sites(job):
        caller, callee = row[1]
        module = caller == "", callee.partition(":")[0]
        modules.setdefault(module, {}).setdefault(callee, row)
    for (on_thread, _), functions in modules.items():
        yield from list(functions.values())[: 1 if on_thread or job != "pipeline" else None]


def cases(job: str, everything: bool) -> Iterator[Case]:
    """Every site in every way; else few of them, each in one way."""
    ranks, _ = JOBS[job]
    those = (tuple(range(ranks)), (0,), (ranks - 1,))
    every = sites(job) if everything else few(job)
    for number, (engine, site, counts) in enumerate(every):
        kinds = KINDS if not site[0] else KINDS[:2]  # on the training thread nothing can wait
        whole = [(kind, middle, who) for kind in kinds for middle in (0, 1) for who in those]
        one = kinds[number % len(kinds)], number // 2 % 2, those[number % 3]
        for kind, middle, who in whole if everything else [one]:
            calling = [rank for rank, count in enumerate(counts) if count]
            failing = [rank for rank in who if rank in calling] or calling
            first = [middle * (count // 2) for count in counts]
            yield {"engine": engine, "site": site, "kind": kind, "ranks": failing, "first": first}


def faults(texts: list[list[str]]) -> Iterator[str]:
    """What is wrong with the cases of all ranks, as these have printed it."""
    for rank, text in enumerate(texts):
        printed, case = list[str](), ""
        for line in text:
            if line.startswith("BEGIN "):
                printed, case = [], line[6:]
            elif line.startswith("END "):
                if not json.loads(line[4:])["same"]:
                    yield f"rank {rank} has other bits: {case} {printed}"
                times_of = Counter(one for one in printed if one.startswith("adaptra: "))
                if repeated := [one for one, times in times_of.items() if times > 1]:
                    yield f"rank {rank} says it again: {case} {repeated}"
            else:
                printed.append(line)
        if "DONE" not in text:  # a line of a thread of ours may come after it
            yield f"rank {rank} has not ended: {case} {printed[-25:]}"


@each_job
def test_nothing_that_the_training_thread_calls_can_wait(job: str) -> None:
    rows = [row for rows in found(job) for row in rows]
    assert [row["waits"] for row in rows] == [[]] * len(rows)
    assert all(row["same"] for row in rows)


@pytest.mark.timing
@pytest.mark.parametrize("job", ADAPTED)
def test_the_sites_are_those_of_a_training_that_is_adapted(job: str) -> None:
    in_time("trainings without a plan", 0 if adapted(found(job), job) else TRIES, TRIES)


@each_job
@pytest.mark.timeout(3600)
def test_a_training_ends_as_stock_whatever_fails(job: str, pytestconfig: pytest.Config) -> None:
    chosen = list(cases(job, pytestconfig.getoption("--full")))
    if pytestconfig.getoption("--quick") or not HAS_TRAINING:  # the oldest release
        chosen = chosen[::7]  # a step that meets every kind, moment and rank
    chosen.sort(key=lambda case: KINDS.index(case["kind"]))  # threads that hang may meet others
    lines = run(chosen, job)
    wrong = list(faults(lines))
    ended = [json.loads(one[4:]) for text in lines for one in text if one[:4] == "END "]
    hits = sum(row["hits"] > 0 for row in ended)
    print(
        f"{len(list(sites(job)))} sites, {len(chosen)} trainings with a fault, {hits} ranks met it"
    )
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
    assert hits >= len(chosen) // 4, "most are met; on a busy machine no plan may be worth it"


def pretrained(folder: Path, iterations: int, *flags: str, **environment: str) -> Done:
    """A training by Megatron's own program, with faults."""
    words = words_of(folder, 2, "--adaptra", *flags, iterations=iterations)[1:]
    ran = zygote(True).run(folder, [str(PRETRAIN), *words], ranks=2, environment=environment)
    assert ran.status == 0, ran.text[-4000:]
    return Done(0, ran.text)


@needs_training
def test_logs_charts_and_checkpoints_of_megatrons_program(tmp_path: Path) -> None:
    """What hangs on Megatron's own log and checkpoints; charts are on the last rank alone."""
    flags = ("--save-interval", "1", "--tensorboard-dir", str(tmp_path / "charts"))
    more = (*flags, "--tensorboard-log-interval", "1", "--save", str(tmp_path / "saved"))
    text = pretrained(tmp_path / "looked", 2, *more).text
    rows = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("SITES ")]
    looked = {(site[0], site[1]) for row in rows for site in row}
    shutil.rmtree(tmp_path / "saved")
    every = [(site, kind) for site in sorted(looked, key=_resume_first) for kind in KINDS[:2]]
    assert len(every) <= ITERATIONS, "one for each iteration"
    done = pretrained(tmp_path / "failed", ITERATIONS, *more, LAW_CASES=json.dumps(every))
    met = re.findall(r"^MET (.*) (raise|garbage) (\d+)$", done.text, re.MULTILINE)
    print(met)
    assert {site for site, _, hits in met if int(hits)} == {str(Site(*site)) for site in looked}
    before = stock(2, "--save-interval", "1", iterations=ITERATIONS)
    assert [done.numbers, done.evaluated] == [before.done.numbers, before.done.evaluated]
    assert digests(tmp_path) == before.digests


def _resume_first(site: tuple[str, str]) -> tuple[bool, tuple[str, str]]:
    """It runs before the first iteration."""
    return not site[1].endswith(":resume"), site
