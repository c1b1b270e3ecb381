"""The law: nothing that adapts a training ends it, or changes a bit of it.

Where it could is found by looking at trainings (law.py says by which rule). Then every call of it
raises, hangs or returns nonsense, on one rank or on all, from the start or in the middle, and the
training ends with the bits of stock Megatron.
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
from running import zygote
from trainings import HAS_TRAINING, Done, digests, needs_training, stock, words_of

SCRIPT = Path(__file__).with_name("law_script.py")
PRETRAIN = SCRIPT.with_name("law_pretrain.py")
ITERATIONS = 20  # of Megatron's own program
STAGES, JOBS = 2, 2  # jobs that share the cases: most of their time they wait for the slow link
WHO = ((0, 1), (0,), (1,))
Case = dict[str, Any]


def run(cases: list[Case] | None, jobs: int, replicas: int = 1) -> list[list[str]]:
    """What each rank has printed; rank 1 of the second job is the last of four."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.json"
        path.write_text(json.dumps(cases))
        words = [str(SCRIPT), "" if cases is None else str(path), folder, str(replicas)]
        ranks = STAGES * jobs * replicas
        done = zygote(False).run(Path(folder), words, ranks=ranks, timeout=1800, ends=False)
    return [list(filter(None, text.splitlines())) for text in done.texts]


@functools.cache
def found() -> list[list[dict[str, Any]]]:
    """By engine, what each rank has found."""
    lines = run(None, 1)
    by_rank = [[json.loads(one[6:]) for one in text if one[:6] == "FOUND "] for text in lines]
    assert all(len(rows) == 2 for rows in by_rank), lines
    return [list(rows) for rows in zip(*by_rank, strict=True)]


def sites() -> Iterator[tuple[str, list[str], list[int]]]:
    """The engine under which it is called, the site, and how often each rank has called it."""
    known = set[str]()
    for rows in reversed(found()):  # native first: it plans less
        counts = [row["calls"] for row in rows]
        for site in sorted({*counts[0], *counts[1]} - known):
            known.add(site)
            yield rows[0]["engine"], json.loads(site), [count.get(site, 0) for count in counts]


def cases(everything: bool) -> Iterator[Case]:
    """Every site in every way; else each function once, from one of its callers, in one way."""
    called = set[str]()
    for number, (engine, site, counts) in enumerate(sites()):
        if not everything and site[1] in called:
            continue
        called.add(site[1])
        kinds = KINDS if not site[0] else KINDS[:2]  # on the training thread nothing can wait
        whole = [(kind, middle, who) for kind in kinds for middle in (0, 1) for who in WHO]
        one = kinds[number % len(kinds)], number // 2 % 2, WHO[number % 3]
        for kind, middle, who in whole if everything else [one]:
            calling = [rank for rank in range(STAGES) if counts[rank]]
            failing = [rank for rank in who if rank in calling] or calling
            first = [middle * (count // 2) for count in counts]
            yield {"engine": engine, "site": site, "kind": kind, "ranks": failing, "first": first}


def in_turn(case: Case) -> int:
    """Cases that hang come last: their threads may meet the faults of cases after them."""
    return KINDS.index(case["kind"])


def faults(job: list[list[str]]) -> Iterator[str]:
    """What is wrong with the cases of a job, as its ranks have printed it."""
    printed, case = list[str](), ""
    for rank, text in enumerate(job):
        for line in text:
            if line.startswith("BEGIN "):
                printed, case = [], line[6:]
            elif line.startswith("END "):
                if not json.loads(line[4:])["same"]:
                    yield f"rank {rank} has other bits: {case} {printed}"
                if repeated := [
                    one
                    for one, times in Counter(printed).items()
                    # Once more by a thread that a fault has kept from ending with its training.
                    if times > 2 and one.startswith("adaptra: ")
                ]:
                    yield f"rank {rank} says it again and again: {case} {repeated}"
            else:
                printed.append(line)
        if not text or text[-1] != "DONE":
            yield f"rank {rank} has not ended: {case} {printed[-25:]}"


def test_nothing_that_the_training_thread_calls_can_wait() -> None:
    assert [row["waits"] for rows in found() for row in rows] == [[]] * 4
    assert all(row["same"] for rows in found() for row in rows)


@pytest.mark.timeout(3600)
def test_a_training_ends_with_stocks_bits_whatever_fails(pytestconfig: pytest.Config) -> None:
    chosen = list(cases(pytestconfig.getoption("--full")))
    if pytestconfig.getoption("--quick"):
        chosen = chosen[::18]
    elif not HAS_TRAINING:  # of the oldest release, beside the newest
        chosen = chosen[::6]
    chosen.sort(key=in_turn)
    lines = run(chosen, JOBS)
    wrong = [text for j in range(JOBS) for text in faults(lines[STAGES * j : STAGES * (j + 1)])]
    ended = [json.loads(one[4:]) for text in lines for one in text if one[:4] == "END "]
    hits = sum(row["hits"] > 0 for row in ended)
    print(f"{len(list(sites()))} sites, {len(chosen)} trainings with a fault, {hits} ranks met it")
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
    assert hits >= len(chosen) // 4, "most are met; on a busy machine no plan may be worth it"


def pretrained(folder: Path, *flags: str, **environment: str) -> Done:
    """A training by Megatron's own program, with faults."""
    words = [str(PRETRAIN), *words_of(folder, 2, "--adaptra", *flags, iterations=ITERATIONS)[1:]]
    done = zygote(True).run(folder, words, ranks=2, environment=environment)
    assert done.status == 0, done.text[-4000:]
    return Done(0, done.text)


@needs_training
def test_logs_charts_and_checkpoints_of_megatrons_program(tmp_path: Path) -> None:
    """What hangs on Megatron's own log and checkpoints; charts are on the last rank alone."""
    flags = ("--save-interval", "1", "--tensorboard-dir", str(tmp_path / "charts"))
    more = (*flags, "--tensorboard-log-interval", "1", "--save", str(tmp_path / "saved"))
    text = pretrained(tmp_path / "looked", *more).text
    found = {
        tuple(site)
        for line in text.splitlines()
        if line.startswith("SITES ")
        for site in json.loads(line[6:])
    }
    shutil.rmtree(tmp_path / "saved")
    every = [(site, kind) for site in sorted(found, key=_resume_first) for kind in KINDS[:2]]
    assert len(every) <= ITERATIONS, "one for each iteration"
    done = pretrained(tmp_path / "failed", *more, LAW_CASES=json.dumps(every))
    met = re.findall(r"^MET (.*) (raise|garbage) (\d+)$", done.text, re.MULTILINE)
    print(met)
    assert {site for site, _, hits in met if int(hits)} == {str(Site(*site)) for site in found}
    before = stock(2, "--save-interval", "1", iterations=ITERATIONS)
    assert [done.numbers, done.evaluated] == [before.done.numbers, before.done.evaluated]
    assert digests(tmp_path) == before.digests


def _resume_first(site: tuple[str, str]) -> tuple[bool, tuple[str, str]]:
    """It runs before the first iteration."""
    return not site[1].endswith(":resume"), site
