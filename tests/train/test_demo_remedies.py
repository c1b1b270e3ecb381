"""The demo with a late rank or a slow replica: so in both arms, and with a remedy in ours alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import summary

pytestmark = pytest.mark.long
LATE = 0.2  # seconds
REMEDIES: dict[str, tuple[str, dict[str, Any]]] = {  # settings, and options of the demo
    "a late rank": (
        "allreduce: direct\n",
        {"data_parallel": 3, "microbatches": 2, "slow": [f"1:{LATE}s"]},
    ),
    "a slow replica": (
        "sync: share\nsync_counts: 5,3\n",
        {"data_parallel": 2, "microbatches": 4, "slow": ["1:2x"]},
    ),
}


@pytest.mark.parametrize("slow", REMEDIES)
def test_a_remedy_is_in_force_in_one_arm_and_losses_are_of_the_same_samples(
    slow: str, tmp_path: Path
) -> None:
    """Were one arm's remedy the other's, bits would be equal, or sums and samples others."""
    settings, options = REMEDIES[slow]
    (tmp_path / "settings.yaml").write_text(settings)
    out = tmp_path / "out"
    done = summary(
        out, stages=2, iterations=9,
        config=str(tmp_path / "settings.yaml"), **options,
    )  # fmt: skip
    assert not done["parameters_identical"], "more than two are added, in another order"
    assert done["equal_to_rounding"] is True
    assert done["parameters_difference"] < 1e-4
    assert done["all_reduces"] == done["shares"] == [], "what is named is not decided on"
    assert f"with {slow}" in (out / "report.html").read_text()
    if "late" in slow:
        for arm in ("stock", "adaptra"):
            assert min(done["arms"][arm]["iteration_ms"][3:6]) >= 1e3 * LATE, arm
