"""gpu_check.sh where there is no GPU: what it refuses, its rehearsal, and faults planted in it.

Where torch is its build for CUDA it is rehearsed over the fake machine, else on the CPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from gpu_check import page, result
from gpu_check.__main__ import PARTS
from launching import ROOT, clean_env, refused, run
from patience import PATIENCE, decided
from processes import outliving
from staged_calls import compared
from transport.ranks import run as run_ranks

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
PAGE = ROOT / "docs" / "evidence" / "gpu.md"
NEEDS_TORCH_FOR_GPUS = {"pieces", "clock", "sync", "hide", "graphs", "memory", "nccl"}


def over_the_fake() -> bool:
    import torch

    return bool(torch.version.cuda)


def lines(text: str) -> dict[str, str]:
    """Part -> its result."""
    found = (line.partition(": ") for line in text.splitlines())
    return {part: rest for part, _, rest in found if rest.startswith(("OK", "FAIL", "NOT RUN"))}


# What a part finds wrong where nothing but this machine was late.
LATE = re.compile(
    r"a mark is off by|an op of .* takes .* by its marks|an op that begins|as long as the peer was"
)


def late(out: Path) -> bool:
    """Whether all that is wrong, of what was written there, is lateness."""
    wrong = [text for part in json.loads(out.read_text())["parts"] for text in part["wrong"]]
    return bool(wrong) and all(LATE.search(text) for text in wrong)


def rehearsed(
    *words: str, status: int, out: Path | None = None, **variables: str
) -> dict[str, str]:
    before = PAGE.read_bytes()
    written = ("--out", str(out)) if out is not None else ()
    done = run(SCRIPT, "--rehearse", *written, *words, timeout=900, **variables)
    shown = f"{lines(done.stdout)}\n{(done.stdout + done.stderr)[-6000:]}"
    if done.returncode == 1 > status and out is not None and late(out / "gpu_check.json"):
        decided(f"all parts in time: {shown}", False)
    assert done.returncode == status, shown
    assert PAGE.read_bytes() == before, "a rehearsal writes nothing"
    assert done.stdout.startswith("rehearsal ")
    return lines(done.stdout)


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
        pytest.param(["--layouts", "pp9"], "pp9", marks=pytest.mark.cold),
        (["--timeout", "0"], "--timeout 0"),
        (["--gpus", "-1"], "--gpus -1"),
        (["--rehearse", "--write"], "--write: only what was run on a GPU"),
        (["--gpu"], "--gpu"),
        (["--hide-message", "3"], "--hide-message 3: a multiple of 2"),
        (["--hide-message", "0"], "--hide-message 0"),
        (["--keep", "/"], "--keep /: it is there already"),
    ],
)
def test_refusals(words: list[str], says: str) -> None:
    assert says in refused(run(SCRIPT, *words))


def test_a_result_is_one_line() -> None:
    found = result.Result("paths", figures=["3 GB/s"], left_out=["NCCL"], ended=True)
    assert found.line == "paths: OK, 3 GB/s (left out: NCCL)"
    for i in range(5):
        found.check(i == 9, f"fault {i}\nof several lines")
    assert found.word == "FAIL"
    assert found.line.startswith("paths: FAIL, fault 0 of several lines; fault 1")
    assert found.line.count("\n") == 0
    assert "and 2 more" in found.line
    assert result.Result("hide", why_not="why").line == "hide: NOT RUN: why"


def test_only_the_parts_that_ran_are_replaced() -> None:
    parts = ("paths", "clock", "hide")
    found = result.Result("clock", figures=["off by 2 us"], ended=True)
    found.table("The clock", ("what", "worst"), [["with anchors", "2 us"]])
    first = page.block("2 x H100", ["clock"], found)
    assert first.startswith("clock: OK, off by 2 us\n\n`scripts/gpu_check.sh clock`, 2")
    assert "| with anchors | 2 us |" in first
    text = f"# GPU\n\nwords\n\n{page.HEADING}\n\nNot run.\n\n## Else\n\nlast\n"
    text = page.replaced(text, {"clock": first}, parts)
    head, tail = f"# GPU\n\nwords\n\n{page.HEADING}\n\n", "\n## Else\n\nlast\n"
    assert text == f"{head}### clock\n\n{first}\n{tail}"
    text = page.replaced(text, {"hide": "hide: OK", "paths": "paths: OK"}, parts)
    assert text == (
        f"{head}### paths\n\npaths: OK\n\n### clock\n\n{first}\n\n### hide\n\nhide: OK\n{tail}"
    )
    second = page.replaced(text, {"clock": "clock: FAIL"}, parts)
    assert second == text.replace(first, "clock: FAIL")
    assert page.replaced("# GPU\n", {"hide": "x"}, parts) == (
        f"# GPU\n\n{page.HEADING}\n\n### hide\n\nx\n"
    )


def test_the_page_has_a_place_for_it() -> None:
    assert PAGE.read_text().count(page.HEADING) == 1


def test_staged_calls_fill_what_the_calls_themselves_do() -> None:
    assert all(run_ranks("gloo", compared, ranks=2))


@pytest.mark.cold
def test_a_part_that_takes_too_long_fails_and_leaves_nothing(tmp_path: Path) -> None:
    found = rehearsed("paths", "--timeout", "0.5", status=1, TMPDIR=str(tmp_path))
    assert "FAIL, paths: not done after 0.5 s: rank 0" in f"{found['paths']}"
    assert outliving(str(tmp_path)) == {}
    assert list(tmp_path.glob("adaptra-gpu-*")) == []


@pytest.mark.cold
@pytest.mark.timing
def test_rehearsal(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    parts = ("paths", "pieces", "clock", "sync")
    found = rehearsed("--keep", str(kept), *parts, status=0, out=out)
    assert_all(found, "OK", *parts)
    assert "with all their bits" in found["paths"]
    text = (out / "gpu_check.md").read_text()
    assert lines(text).keys() == found.keys()
    assert "| queues, way | MiB |" in text
    assert [one["part"] for one in json.loads((out / "gpu_check.json").read_text())["parts"]] == [
        *found
    ]
    assert len(list(kept.glob("paths-*/*.txt"))) >= 2, "what its ranks have printed"


@pytest.mark.cold
@pytest.mark.trains
def test_rehearsal_of_equality() -> None:
    found = rehearsed("equality", status=0)
    assert "6 of 6 cases have the bits of stock" in found["equality"]


@pytest.mark.cold
@pytest.mark.trains
def test_a_part_that_is_killed_leaves_what_it_found(tmp_path: Path) -> None:
    """Where torch has no CUDA the part does not run, which is what it leaves then."""
    out = tmp_path / "out" / "gpu_check.json"
    words = [SCRIPT, "--rehearse", "--part", "nccl", "--out", out, "--keep", tmp_path / "kept"]
    with subprocess.Popen([str(word) for word in words], cwd=ROOT, env=clean_env()) as process:
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            if out.exists() and "two ranks on one GPU" in out.read_text():
                break
            time.sleep(0.05)  # another process writes it
        process.kill()
    (found,) = json.loads(out.read_text())["parts"]
    assert found["word"] == expected("nccl", "CUT OFF")
    assert outliving(str(tmp_path)) == {}
    if over_the_fake():
        assert found["figures"][0].startswith("NCCL 2.")
        assert "over our network plugin (AdaptraSlow" in found["figures"][1]
        assert "nccl: CUT OFF, NCCL 2." in out.with_suffix(".md").read_text()


@pytest.mark.cold
def test_planted_faults_are_found() -> None:
    found = rehearsed("--plant", "paths", "clock", status=1)
    assert_all(found, "FAIL", "paths", "clock")
    assert "other bytes in " in found["paths"]
    assert not over_the_fake() or "a mark is off by" in found["clock"]


@pytest.mark.cold
@pytest.mark.trains
@pytest.mark.large
@pytest.mark.timing
@pytest.mark.parametrize("gpus", ["1", "2"])
def test_rehearsal_of_trainings(gpus: str) -> None:
    longer = ("--delay", "100")  # than what a busy machine adds
    parts = ["hide", "memory", "paths", "sync", *(["graphs"] if gpus == "1" else [])]
    found = rehearsed("--gpus", gpus, *longer, *parts, status=0)
    assert_all(found, "OK", *parts)
    if over_the_fake():
        assert ("NCCL" in found["hide"].partition("left out")[2]) is (gpus == "1")


@pytest.mark.cold
@pytest.mark.trains
@pytest.mark.large
@pytest.mark.timing
def test_rehearsal_of_nccl() -> None:
    found = rehearsed("--part", "nccl", "--timeout", "900", status=0)
    assert_all(found, "OK", "nccl")
    for words in ("PP 2, eager", "PP 2, credit first", "PP 2 x DP 2, eager", "PP 4, CUDA graphs"):
        assert f"over NCCL, {words}" in found["nccl"] or not over_the_fake()


@pytest.mark.cold
@pytest.mark.trains
@pytest.mark.large
def test_planted_faults_of_all_parts_are_found() -> None:
    found = rehearsed("--plant", status=1)
    assert_all(found, "FAIL", *PARTS)
    if over_the_fake():
        for part, words in (
            ("sync", "as long as the peer was late"), ("hide", "never left the GPU's queue"),
            ("graphs", "from where the next replay writes"), ("pieces", "other bytes in 42 of 42"),
            ("memory", "has reset the allocator's peak"), ("nccl", "never left the GPU's queue"),
        ):  # fmt: skip
            assert words in found[part]
    assert "other losses" in found["equality"]
