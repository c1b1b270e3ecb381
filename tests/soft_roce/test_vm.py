"""The virtual machine of these tests leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fakes.soft_roce.vm import prepared
from patience import PATIENCE
from processes import living, outliving
from transport.ranks import until

BOOTS = """
import sys
from pathlib import Path
from fakes.soft_roce.vm import boot
boot(Path(sys.argv[1]), Path(sys.argv[2]), "sleep 1000", 1000)
"""


@pytest.mark.vm
def test_a_run_that_is_killed_leaves_no_machine(tmp_path: Path) -> None:
    made, why = prepared()
    if made is None:
        pytest.skip(why)
    run = subprocess.Popen(
        [sys.executable, "-c", BOOTS, str(made), str(tmp_path)], cwd=Path(__file__).parents[1]
    )
    until(lambda: (tmp_path / "console.txt").exists(), "the machine runs")
    assert len(living(f"path={tmp_path},")) == 1
    run.kill()
    run.wait(PATIENCE)
    assert not outliving(f"path={tmp_path},")
