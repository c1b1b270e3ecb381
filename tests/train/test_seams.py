"""The stock arm is stock, activation is undone, and unknown releases are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import ENVIRONMENT, summary, zygote
from trainings import Done, needs_training, stock, words_of

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.large)])
def test_the_stock_arm_trains_as_megatron_alone(precision: str, tmp_path: Path) -> None:
    """Neither the second arm in the same processes nor the emulated link leaves a trace."""
    out = tmp_path / "losses.json"
    done = summary(tmp_path, stages=2, iterations=9, precision=precision)
    words = [str(HERE / "ranks" / "stock_script.py"), str(tmp_path / "text"), str(out), precision]
    alone = zygote(False).run(tmp_path, words, ranks=2)
    assert alone.status == 0, alone.text[-3000:]
    assert json.loads(out.read_text()) == done["arms"]["stock"]["losses"]


@needs_training
def test_a_pipeline_over_ucc_trains_as_stock_with_one_line(tmp_path: Path) -> None:
    def run(*flags: str) -> Done:
        flags = "--adaptra", "--pipeline-model-parallel-comm-backend", "ucc", *flags
        words = [
            str(HERE / "ranks" / "ucc_pretrain.py"),
            *words_of(tmp_path, 2, *flags, iterations=6),
        ]
        more = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}  # what Megatron wants with UCC
        done = zygote(True).run(tmp_path, words, ranks=2, environment=more)
        return Done(done.status, done.text)

    ours = run()
    assert ours.status == 0, ours.text[-3000:]
    assert ours.printed == stock(2, iterations=6).done.printed
    (line,) = re.findall(r"^adaptra: (.*)", ours.text, re.MULTILINE)
    assert line.startswith("WARNING: training goes on as stock Megatron: the pipeline's messages")
    assert "go by ucc; gloo and nccl are supported" in line
    strict = run("--adaptra-strict")
    assert strict.status != 0
    assert "go by ucc; gloo and nccl are supported" in strict.text
    assert strict.printed == []


@pytest.mark.parametrize("version", ["0.12.0", "0.13.1"])
def test_an_old_megatron_core_is_refused_with_one_line(version: str, tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core.parent / "__init__.py").touch()
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (core / "package_info.py").write_text("".join(f"{name} = {n}\n" for name, n in numbers))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "megatron_adaptra", "demo", "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=300, check=False,
        env={**ENVIRONMENT, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert version in done.stderr
    assert "0.14 to 0.19" in done.stderr
