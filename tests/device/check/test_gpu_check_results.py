"""Parts of gpu_check by themselves: where results go, what failed, and what has to be built."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_check import __main__ as program
from gpu_check import deterministic, page, paths, ranks, trainings
from gpu_check.result import Result
from gpu_check.target import CPU, Target
from launching import ROOT, refused, run

from megatron_adaptra.measure.iteration_record import IterationRecord
from megatron_adaptra.measure.report import Memory

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
TARGET = Target(
    CPU, 0, {"name": "", "nccl": "", "torch": "2", "cuda": "", "core": "0", "python": "3"}
)


def measured() -> Result:
    found = Result("clock", figures=["off by 2 us"], seconds=7.2, ended=True)
    found.table("The clock", ("what", "worst"), [["with anchors", "2 us"]])
    return found


@pytest.mark.parametrize("name", ["new/folder", "here.md", "here.json"])
def test_results_go_to_files_of_their_own(tmp_path: Path, name: str) -> None:
    results = [measured(), Result("hide", why_not="why")]
    text, data = page.write_apart(tmp_path / name, "2 x H100", ["clock"], results, program.PARTS)
    stem = name.partition(".")[0] + ("" if "." in name else "/gpu_check")
    assert (text, data) == (tmp_path / f"{stem}.md", tmp_path / f"{stem}.json")
    section = text.read_text()
    assert section.startswith(f"{page.HEADING}\n\n### clock\n\nclock: OK, off by 2 us\n")
    assert ", 7 s: 2 x H100." in section
    assert section.index("| with anchors | 2 us |") < section.index("hide: NOT RUN: why")
    found = json.loads(data.read_text())
    assert (found["target"], found["words"]) == ("2 x H100", ["clock"])
    clock, hide = found["parts"]
    assert (clock["word"], clock["seconds"], clock["figures"]) == ("OK", 7.2, ["off by 2 us"])
    assert clock["tables"][0]["rows"] == [["with anchors", "2 us"]]
    assert (hide["word"], hide["why_not"]) == ("NOT RUN", "why")


def options(out: Path, *parts: str) -> Any:
    words = ["--rehearse", "--out", str(out), *parts]
    return program.parse(words)


def test_an_unexpected_error_fails_its_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        return [].surprise  # type: ignore[attr-defined]

    monkeypatch.setattr(paths, "run", broken)
    results = program.run_parts(TARGET, tmp_path, options(tmp_path / "out", "paths", "clock"))
    assert [result.word for result in results] == ["FAIL", "NOT RUN"]
    shown = capsys.readouterr()
    assert "paths: FAIL, AttributeError" in shown.out
    assert "in broken" in shown.err


def test_of_a_long_output_the_first_error_and_the_end_are_shown() -> None:
    cause = "RuntimeError: the cause"
    output = "\n".join(["a" * 50_000, "just before", cause, "b" * 50_000, "the end"])
    shown = ranks._excerpt(output, cause)
    assert len(shown) < 4000
    for words in ("just before", cause, "the end"):
        assert words in shown
    assert ranks._excerpt(output, "").endswith("the end")
    assert len(ranks._excerpt(output, "")) < 4000
    assert ranks._excerpt(f"before\n{cause}\n", cause) == f"before\n{cause}\n"


def test_kernels_that_torch_warns_of_are_named() -> None:
    text = "x.py:3: UserWarning: put_ does not have a deterministic implementation, but you set\n"
    assert deterministic.without(text + text + "all else\n") == {"put_"}


@pytest.fixture
def pretrain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as the second of two ranks on one GPU imports it."""
    monkeypatch.setenv("ADAPTRA_GPU_CHECK", json.dumps({"gpus": 1}))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delitem(sys.modules, "gpu_check.pretrain", raising=False)
    yield importlib.import_module("gpu_check.pretrain")
    assert os.environ["LOCAL_RANK"] == "0", "the one GPU"


def test_what_a_rank_of_a_training_writes(
    pretrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setitem(pretrain.GIVEN, "folder", str(tmp_path))
    known = IterationRecord(1, 7, begin=1.0, memory=Memory(2.0, peak_bytes=30, per_microbatch=15))
    session = SimpleNamespace(
        reports=SimpleNamespace(records=[known, IterationRecord(1, 8, stock=True, unusable="odd")])
    )
    pretrain.Watch(None).write([torch.nn.Linear(2, 2)], session)
    first, second = json.loads((tmp_path / "rank1.json").read_text())["records"]
    assert (first["iteration"], first["starved"], first["unusable"]) == (7, 0.0, "")
    assert (first["memory"]["peak"], first["memory"]["peak_bytes"]) == (2.0, 30)
    assert first["memory"]["per_microbatch"] == 15
    assert (second["stock"], second["starved"], second["memory"]) == (True, None, None)


def test_a_training_that_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fails(*_: Any) -> Any:
        tries.append(1)
        raise ranks.Failed("rank 1 is gone", "its log")

    monkeypatch.setattr(trainings, "_train", fails)
    monkeypatch.setattr(trainings, "_done", {})
    for words in ("rank 1 is gone", "rank 1 is gone .as for the part before."):
        with pytest.raises(ranks.Failed, match=words):
            trainings.train(TARGET, tmp_path, ranks.Deadline(1.0), None, plugin=False)
    assert len(tries) == 1


@pytest.mark.long
def test_gloo_stands_in_for_a_gpu(pretrain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_adaptra.adapter.entry import activate

    monkeypatch.setattr(activate, "messages_on_gpus", activate.messages_on_gpus)  # put back later
    pretrain.on_a_gpu_all_the_same()
    assert activate.messages_on_gpus()


# A Python whose engine is there once it was built. `works`: whether that can be.
PYTHON = """#!/bin/sh
case "$*" in
  *_native*) [ -e "$0.built" ] ;;
  *build_ext*) {build} ;;
  *) echo "ran $*" ;;
esac
"""


def python(folder: Path, build: str) -> str:
    path = folder / "python"
    path.write_text(PYTHON.replace("{build}", build))
    path.chmod(0o755)
    return str(path)


def test_the_engine_is_built_where_it_is_missing(tmp_path: Path) -> None:
    given = python(tmp_path, 'touch "$0.built"')
    done = run(SCRIPT, "clock", ADAPTRA_PYTHON=given, CXX="sh")
    assert done.stderr == f"adaptra: building the engine for {given} in place\n"
    assert done.stdout == "ran -m gpu_check clock\n"
    again = run(SCRIPT, "clock", ADAPTRA_PYTHON=given, CXX="sh")
    assert (again.stderr, again.stdout) == ("", done.stdout)


def test_why_the_engine_cannot_be_built(tmp_path: Path) -> None:
    given = python(tmp_path, "echo 'Python.h: error: no such file'; echo 'warning: failed'")
    assert "there is no C++ compiler none" in refused(
        run(SCRIPT, ADAPTRA_PYTHON=given, CXX="none -O2")
    )
    done = run(SCRIPT, ADAPTRA_PYTHON=given, CXX="sh", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "could not be built for" in done.stderr.splitlines()[-1]
    assert "Python.h: error: no such file" in done.stderr.splitlines()[-1]
    assert "there is no nowhere" in refused(run(SCRIPT, ADAPTRA_PYTHON="nowhere"))
