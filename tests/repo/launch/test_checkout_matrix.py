"""scripts/test_megatron_lm.sh: says at once why a row failed, and leaves nothing when it is ended.

The checkouts here hold only what the script looks at.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from launching import ROOT, clean_env

# A release for this Python, and what names the environment for it.
MINOR, VENV = (16, "ADAPTRA_VENV_311") if sys.version_info < (3, 12) else (19, "ADAPTRA_VENV_312")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MAKEFILE = """\
helpers_cpp$(shell python3-config --extension-suffix):
\tpython3 -c 'import sys; print(sys.prefix)' > made_by; touch $@
"""


@pytest.fixture
def checkout(checkout: Path) -> Path:
    (checkout / "megatron/core/package_info.py").write_text(
        f"MAJOR = 0\nMINOR = {MINOR}\nPATCH = 1\nPRE_RELEASE = ''\n"
    )
    (checkout / "megatron/core/datasets").mkdir()
    (checkout / "megatron/core/datasets/Makefile").write_text(MAKEFILE)
    return checkout


def start(checkout: Path, temporary: Path, python: str) -> subprocess.Popen[str]:
    """As from a shell with another Python first on PATH, which answers nothing."""
    wrong = temporary.parent / "wrong"
    wrong.mkdir()
    for name in ("python3", "python3-config"):
        (wrong / name).write_text("#!/bin/sh\necho not this one; exit 9\n")
        (wrong / name).chmod(0o755)
    temporary.mkdir()
    path = f"{wrong}:{os.environ['PATH']}"
    environment = clean_env(**{VENV: python}, TMPDIR=str(temporary), PATH=path)
    command = [str(ROOT / "scripts/test_megatron_lm.sh"), str(checkout), "--only", "pp2"]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_failed_row_says_why_in_its_line(checkout: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "no-torch", with_pip=False)
    with start(checkout, tmp_path / "tmp", str(tmp_path / "no-torch")) as process:
        output = process.communicate(timeout=500)
    assert process.returncode == 1, output
    line = output[1].strip()
    assert len(line.splitlines()) == 1
    assert line.startswith("Megatron-LM: pp2 ... FAILED: stock ended with 1: "), output[1]
    assert "No module named 'torch'" in line
    # Megatron's Makefile asks for python3 and python3-config, and has found the environment's.
    datasets = checkout / "megatron/core/datasets"
    assert (datasets / "made_by").read_text().strip() == str(tmp_path / "no-torch")
    assert [path.name for path in datasets.glob("helpers_cpp*")] == [f"helpers_cpp{SUFFIX}"]


@pytest.mark.cold
def test_a_terminated_run_leaves_no_folder_and_no_process(checkout: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    # Each rank holds the writing end: it is closed when the last of them has ended.
    (checkout / "pretrain_gpt.py").write_text(
        f"import signal, tempfile\nheld = open({str(started)!r}, 'w', buffering=1)\n"
        "tempfile.mkdtemp()\nprint('started', file=held)\nsignal.pause()\n"
    )
    with start(checkout, tmp_path / "tmp", sys.prefix) as process:
        with started.open() as ranks:
            assert ranks.readline() == "started\n"
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=300)
            assert set(ranks.read().split()) <= {"started"}  # to its end: no rank is left
    assert process.returncode == 143, output
    assert output[1].endswith("interrupted\n")
    assert list((tmp_path / "tmp").iterdir()) == []
