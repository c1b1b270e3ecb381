"""Megatron-LM's own unit tests of pipelines end the same with the plugin as without it.

ADAPTRA_MEGATRON_LM names checkouts, separated by colons. Which of their tests run, and by whom
their schedules are run: docs/evidence/upstream-tests.md.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from processes import outliving

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "megatron_lm_upstream")]

from make_patches import release  # noqa: E402
from megatron_lm_rows import pythons_for  # noqa: E402
from outcomes import differences, iterations, passed  # noqa: E402
from ranks import LENT, STOCK, arms_for, run_all, with_loan  # noqa: E402

NAME = "ADAPTRA_MEGATRON_LM"
CHECKOUTS = [folder for folder in os.environ.get(NAME, "").split(":") if folder]
SCHEDULES = "pipeline_parallel/test_schedules.py::test_"
EVERY_RELEASE = {
    f"{SCHEDULES}{name}"
    for name in (
        "get_forward_backward_func",
        "forward_backward_func_without_pipeline_parallel",
        "forward_backward_func_with_pipeline_parallel",
        "forward_backward_func_with_interleaving",
        "forward_backward_func_with_uneven_interleaving",
        "forward_backward_pipelining_without_interleaving_with_custom_pgs",
        "forward_backward_pipelining_with_interleaving_with_custom_pgs",
        "forward_backward_no_pipelining_with_custom_pgs",
    )
}


@pytest.mark.timeout(7200)  # 15 minutes on two idle cores
@pytest.mark.skipif(not CHECKOUTS, reason=f"{NAME} names no Megatron-LM checkouts (FOLDER:FOLDER)")
@pytest.mark.skipif(
    importlib.util.find_spec("pytest_mock") is None,
    reason="Megatron-LM's tests need pytest-mock: pip install pytest-mock",
)
@pytest.mark.parametrize("checkout", CHECKOUTS or [""], ids=lambda folder: Path(folder).name)
def test_upstreams_tests_end_as_with_stock(checkout: str, tmp_path: Path) -> None:
    folder = Path(checkout).resolve()
    version = release(folder)[:2]
    pythons = pythons_for(version)
    if f"{sys.version_info[0]}.{sys.version_info[1]}" not in pythons:
        pytest.skip(f"{folder.name} needs Python {' or '.join(pythons)}")
    lenders = [Path(name).resolve() for name in CHECKOUTS if (Path(name) / LENT).exists()]
    if not lenders:
        pytest.skip(f"tests that train over several stages come with 0.19: add one to {NAME}")
    whole = with_loan(folder, lenders[0], tmp_path / "checkout")
    arms = {arm: run_all(whole, arm, tmp_path) for arm in arms_for(version)}
    assert not outliving(str(tmp_path))

    stock = arms[STOCK]
    logs = f"logs of all ranks are in {tmp_path}"
    assert all(passed(tests) >= EVERY_RELEASE for tests in stock), logs
    for arm in ("native", "executor"):
        assert [set(tests) for tests in arms[arm]] == [set(tests) for tests in stock], (arm, logs)
    for arm, outcomes in arms.items():
        assert not differences(stock, outcomes), (arm, logs)
        # pp2, pp4 and tp2-pp2, two models, two iterations each
        assert arm == STOCK or iterations(outcomes) >= 12, (arm, logs)
