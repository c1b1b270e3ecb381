"""gpu_check.sh where there is no GPU: what it refuses, its rehearsal, and faults planted in it.

Where torch is its build for CUDA it is rehearsed over the fake machine, else on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from launching import ROOT, refused, run
from processes import outliving

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
FOLDER = ROOT / "benchmarks" / "gpu_check"
PAGE = ROOT / "docs" / "evidence" / "gpu.md"
NEEDS_TORCH_FOR_GPUS = {"clock", "sync", "hide", "memory"}


@contextlib.contextmanager
def modules(*names: str) -> Iterator[list[ModuleType]]:
    """The check's own, which are of no package; gone afterwards."""
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path[:] = before
        ours = {path.stem for path in FOLDER.glob("*.py")} | {"common"}
        for name in (set(sys.modules) - known) & ours:
            del sys.modules[name]


def over_the_fake() -> bool:
    import torch

    return bool(torch.version.cuda)


def lines(text: str) -> dict[str, str]:
    """Part -> its verdict."""
    found = (line.partition(": ") for line in text.splitlines())
    return {part: rest for part, _, rest in found if rest.startswith(("OK", "FAIL", "NOT RUN"))}


def rehearsed(*words: str, status: int, **variables: str) -> dict[str, str]:
    page = PAGE.read_bytes()
    result = run(SCRIPT, "--rehearse", *words, timeout=900, **variables)
    said = f"{lines(result.stdout)}\n{(result.stdout + result.stderr)[-6000:]}"
    assert result.returncode == status, said
    assert PAGE.read_bytes() == page, "a rehearsal writes nothing"
    assert result.stdout.startswith("rehearsal ")
    return lines(result.stdout)


def expected(part: str, word: str) -> str:
    return word if over_the_fake() or part not in NEEDS_TORCH_FOR_GPUS else "NOT RUN"


def assert_all(found: dict[str, str], word: str, *parts: str) -> None:
    assert set(found) == set(parts)
    for part in parts:
        assert found[part].startswith(expected(part, word)), found


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    line = refused(run(SCRIPT, CUDA_VISIBLE_DEVICES=""))
    assert "finds no CUDA GPU" in line
    assert "--rehearse" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["speed"], "part speed"),
        (["--layouts", "pp9"], "pp9"),
        (["--timeout", "0"], "--timeout 0"),
        (["--gpus", "-1"], "--gpus -1"),
        (["--rehearse", "--write"], "--write: only what was run on a GPU"),
        (["--gpu"], "--gpu"),
    ],
)
def test_refusals(words: list[str], says: str) -> None:
    assert says in refused(run(SCRIPT, *words))


def test_a_verdict_is_one_line() -> None:
    with modules("verdict") as (verdict,):
        found = verdict.Verdict("lanes", figures=["3 GB/s"], left_out=["NCCL"])
        assert found.line == "lanes: OK, 3 GB/s (left out: NCCL)"
        for i in range(5):
            found.check(i == 9, f"fault {i}\nof several lines")
        assert found.word == "FAIL"
        assert found.line.startswith("lanes: FAIL, fault 0 of several lines; fault 1")
        assert found.line.count("\n") == 0
        assert "and 2 more" in found.line
        assert verdict.not_run("hide", "why").line == "hide: NOT RUN: why"


def test_only_the_parts_that_ran_are_replaced() -> None:
    parts = ("lanes", "clock", "hide")
    with modules("page", "verdict") as (page, verdict):
        found = verdict.Verdict("clock", figures=["off by 2 us"])
        found.table("The clock", ("what", "worst"), [["with anchors", "2 us"]])
        first = page.block("2 x H100", ["clock"], found)
        assert first.startswith("clock: OK, off by 2 us\n\n`scripts/gpu_check.sh clock`, 2")
        assert "| with anchors | 2 us |" in first
        text = f"# GPU\n\nwords\n\n{page.HEADING}\n\nNot run.\n\n## Else\n\nlast\n"
        text = page.replaced(text, {"clock": first}, parts)
        head, tail = f"# GPU\n\nwords\n\n{page.HEADING}\n\n", "\n## Else\n\nlast\n"
        assert text == f"{head}### clock\n\n{first}\n{tail}"
        text = page.replaced(text, {"hide": "hide: OK", "lanes": "lanes: OK"}, parts)
        assert text == (
            f"{head}### lanes\n\nlanes: OK\n\n### clock\n\n{first}\n\n### hide\n\nhide: OK\n{tail}"
        )
        second = page.replaced(text, {"clock": "clock: FAIL"}, parts)
        assert second == text.replace(first, "clock: FAIL")
        assert page.replaced("# GPU\n", {"hide": "x"}, parts) == (
            f"# GPU\n\n{page.HEADING}\n\n### hide\n\nx\n"
        )


def test_the_page_has_a_place_for_it() -> None:
    with modules("page") as (page,):
        assert PAGE.read_text().count(page.HEADING) == 1


def test_staged_calls_fill_what_the_calls_themselves_do() -> None:
    script = Path(__file__).with_name("host_staged_script.py")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    result = run(
        *launcher, "--nproc-per-node", 2, script, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("good") == 2


@pytest.mark.cold
def test_a_part_that_takes_too_long_fails_and_leaves_nothing(tmp_path: Path) -> None:
    found = rehearsed("lanes", "--timeout", "0.5", status=1, TMPDIR=str(tmp_path))
    assert "FAIL, lanes: not done after 0.5 s: rank 0" in f"{found['lanes']}"
    assert outliving(str(tmp_path)) == {}
    assert list(tmp_path.glob("adaptra-gpu-*")) == []


@pytest.mark.cold
def test_rehearsal() -> None:
    found = rehearsed("lanes", "clock", "sync", status=0)
    assert_all(found, "OK", "lanes", "clock", "sync")
    assert "with all their bits" in found["lanes"]


@pytest.mark.cold
@pytest.mark.trains
def test_rehearsal_of_equality() -> None:
    found = rehearsed("equality", status=0)
    assert "6 of 6 cases have the bits of stock" in found["equality"]


@pytest.mark.cold
def test_planted_faults_are_found() -> None:
    found = rehearsed("--plant", "lanes", "clock", status=1)
    assert_all(found, "FAIL", "lanes", "clock")
    assert "other bytes in " in found["lanes"]
    assert not over_the_fake() or "a mark is off by" in found["clock"]


@pytest.mark.cold
@pytest.mark.trains
@pytest.mark.large
@pytest.mark.timing
@pytest.mark.parametrize("gpus", ["1", "2"])
def test_rehearsal_of_trainings(gpus: str) -> None:
    longer = ("--delay", "100")  # than what a busy machine adds
    found = rehearsed("--gpus", gpus, *longer, "hide", "memory", "lanes", "sync", status=0)
    assert_all(found, "OK", "hide", "memory", "lanes", "sync")
    if over_the_fake():
        assert ("NCCL" in found["hide"].partition("left out")[2]) is (gpus == "1")


@pytest.mark.cold
@pytest.mark.trains
@pytest.mark.large
def test_planted_faults_of_all_parts_are_found() -> None:
    found = rehearsed("--plant", status=1)
    assert_all(found, "FAIL", "lanes", "clock", "sync", "hide", "equality", "memory")
    if over_the_fake():
        for part, words in (
            ("sync", "as long as the peer was late"), ("hide", "never left the GPU's queue"),
            ("memory", "has reset the allocator's peak"),
        ):  # fmt: skip
            assert words in found[part]
    assert "other losses" in found["equality"]
