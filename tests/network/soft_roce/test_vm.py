"""The virtual machine of these tests: it leaves nothing behind, and is not waited for in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fakes.soft_roce.vm import FrozenError, boot, prepared
from patience import PATIENCE
from processes import living, outliving
from transport.ranks import until

pytestmark = [pytest.mark.large, pytest.mark.vm]

BOOTS = """
import sys
from pathlib import Path
from fakes.soft_roce.vm import boot
boot(Path(sys.argv[1]), Path(sys.argv[2]), "sleep 1000", 1000)
"""


@pytest.fixture
def made() -> Path:
    """The folder with the machine's kernel."""
    found, why = prepared()
    if found is None:
        pytest.skip(why)
    return found


def test_a_run_that_is_killed_leaves_no_machine(made: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", BOOTS, str(made), str(tmp_path)],
        cwd=Path(__file__).parents[2] / "support",
    )
    until(lambda: (tmp_path / "console.txt").exists(), "the machine runs")
    assert len(living(f"path={tmp_path},")) == 1
    run.kill()
    run.wait(PATIENCE)
    assert not outliving(f"path={tmp_path},")


def test_a_machine_that_stands_still_is_not_waited_for(made: Path, tmp_path: Path) -> None:
    def freeze() -> None:
        until(lambda: (tmp_path / "console.txt").exists(), "the machine runs")
        (pid,) = living(f"path={tmp_path},")
        os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=freeze)
    thread.start()
    with pytest.raises(FrozenError, match=r"before .*, no life for 5 s: .* qemu itself does not"):
        boot(made, tmp_path, "sleep 1000", 1000, frozen=5)
    thread.join(PATIENCE)
    assert not outliving(f"path={tmp_path},")
