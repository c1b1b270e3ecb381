"""gpu_check.sh where there is no GPU: what it refuses, and its rehearsal on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from launching import ROOT, refused, run

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
PAGE = ROOT / "docs" / "evidence" / "gpu.md"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    path = ROOT / "benchmarks" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    line = refused(run(SCRIPT, CUDA_VISIBLE_DEVICES=""))
    assert "finds no CUDA GPU" in line
    assert "--cpu" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--layouts", "pp9"], "pp9"),
        (["--only", "speed"], "speed"),
        (["--pairs", "0"], "--pairs 0"),
        (["--gpu"], "--gpu"),
    ],
)
def test_refusals(words: list[str], says: str) -> None:
    assert says in refused(run(SCRIPT, *words))


def test_only_its_own_section_is_replaced(program: ModuleType) -> None:
    first, second = (f"{program.HEADING}\n\n{word}\n" for word in ("first", "second"))
    page = program.replaced("# GPU\n\nwords\n", first)
    assert page == f"# GPU\n\nwords\n\n{first}"
    assert program.replaced(page, second) == f"# GPU\n\nwords\n\n{second}"
    more = program.replaced(page + "\n## Else\n\nlast\n", second)
    assert more == f"# GPU\n\nwords\n\n{second}\n## Else\n\nlast\n"


def test_staged_calls_fill_what_the_calls_themselves_do() -> None:
    script = Path(__file__).with_name("host_staged_script.py")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    result = run(
        *launcher, "--nproc-per-node", 2, script, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("good") == 2


@pytest.mark.trains
@pytest.mark.cold
@pytest.mark.timeout(1200)
def test_rehearsal_on_the_cpu() -> None:
    page = PAGE.read_bytes()
    result = run(SCRIPT, "--cpu", "--quick", "--timeout", 500, timeout=1100)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line[:1] == "|"]
    found = {row[0]: row[1:] for row in rows}
    assert found["pp2: fp32"] == ["2", "6", "6"]
    for schedule in (
        "Megatron, without pipelining", "executor, F0 B0 F1 B1", "executor, F0 I0 W0 F1 I1 W1",
        "Megatron's 1F1B", "native, 1f1b", "executor, 1f1b", "executor, zb-h1",
    ):  # fmt: skip
        assert float(found[schedule][0]) > 0.0
        assert found[schedule][-1] == "yes"
    for plan in ("1f1b", "1f1b, recompute", "zb-h1"):
        for stage in range(4):
            assert float(found[f"{plan}, stage {stage}"][2]) > 0.0
    assert "Nothing differed." in result.stdout
    assert PAGE.read_bytes() == page, "a rehearsal writes nothing"
