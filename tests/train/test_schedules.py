"""Every schedule trains Megatron's models to the same bits as stock Megatron.

Which schedules of which models: cases.py. All of a layout run in the same processes.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cases import LAYOUTS, Case, chosen
from packaging.version import Version
from running import zygote

from megatron_adaptra.adapter.compat.profiles import installed_version

HERE = Path(__file__).parent
NEWEST = installed_version() >= Version("0.17")


def selected(config: pytest.Config) -> list[tuple[str, Case]]:
    """All with --full; every pair of values without, of an old release each value; of these, few
    stages with --quick."""
    found = chosen("all" if config.getoption("--full") else "pairs" if NEWEST else "value")
    quick = config.getoption("--quick")
    return [(layout, case) for layout, case in found if not quick or layout in ("pp2", "pp3")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = selected(metafunc.config)
        ids = [case.name for _, case in cases]
        metafunc.parametrize(("layout", "case"), cases, ids=ids)


@functools.cache
def trained(layout: str, config: pytest.Config) -> dict[str, list[dict[str, Any]]]:
    """By case, what every rank ended with; all cases of a layout run in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.json"
        mine = [case for name, case in selected(config) if name == layout]
        # Megatron leaves the threads of its groups behind, and has others for chunks.
        mine.sort(key=lambda case: case.shape.chunks)
        cases.write_text(json.dumps([case.dump() for case in mine]))
        ranks, _ = LAYOUTS[layout]
        words = [str(HERE / "ranks" / "schedules_script.py"), str(cases), folder]
        done = zygote(False).run(Path(folder), words, ranks=ranks, timeout=1800)
    found = [json.loads(line[5:]) for line in done.texts[0].splitlines() if line[:5] == "CASE "]
    by_name = {row[0]["name"]: row for row in found}
    if done.status:
        by_name["error"] = [{"error": done.text[-4000:]}]
    return by_name


@pytest.mark.timeout(2000)
def test_same_bits_as_stock_and_the_predicted_memory(
    layout: str, case: Case, pytestconfig: pytest.Config
) -> None:
    results = trained(layout, pytestconfig)
    ranks = results.get(case.name)
    assert ranks is not None, results["error"]
    if case.engine != "stock":
        kinds = {kind for rank in ranks for ran in rank["ours"]["ran"] for kind in ran}
        halves = case.policy.startswith("zb") or "adaptive" in case.name
        assert {"F", "I", "W"} <= kinds if halves else {"F", "B"} <= kinds
        assert halves or {"I", "W"}.isdisjoint(kinds)
        assert ("R" in kinds) is case.recompute
    for rank in ranks:
        for what in ("losses", "steps", "parameters", "random", "statistics"):
            assert rank["ours"][what] == rank["stock"][what], what
        for peak in rank["ours"]["peaks"] if case.engine == "executor" else ():
            assert peak == pytest.approx(rank["ours"]["predicted_peak"])
    assert any(rank["stock"]["losses"] for rank in ranks)


def test_sequence_parallel_layers_in_halves(tmp_path: Path) -> None:
    done = zygote(False).run(
        tmp_path, [str(HERE / "ranks" / "sequence_parallel_script.py")], ranks=2
    )
    assert done.status == 0, done.text[-3000:]
    assert done.text.count("good") == 2


def test_what_a_forward_does_besides_happens_once(tmp_path: Path) -> None:
    done = zygote(False).run(tmp_path, [str(HERE / "ranks" / "replay_script.py")])
    assert "REPLAYED" in done.text
