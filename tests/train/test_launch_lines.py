"""What ranks print: any bytes, lines of any length; what looks like progress and is none."""

from pathlib import Path
from typing import Any

import pytest

from megatron_adaptra.demo import launch
from megatron_adaptra.demo.options import DemoOptions


@pytest.mark.cold
def test_the_launcher_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_WORKER", "noisy_rank")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "ranks"), prepend=":")
    steps: list[dict[str, Any]] = []
    options = DemoOptions(stages=2, out=str(tmp_path / "out"))
    assert launch.launch(options, launch.prepare(options), steps.append) == {}
    assert [step["iteration"] for step in steps] == [3, 3], "one of each rank"
    log = (tmp_path / "out" / "ranks.log").read_text(encoding="utf-8")
    assert log.count("caf\N{REPLACEMENT CHARACTER} ") == 2
    assert log.count("{broken") == 2
