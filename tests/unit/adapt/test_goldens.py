"""The four decision loops say, log and propose what files in goldens/ keep.

`python tests/unit/adapt/test_goldens.py` writes these anew.
"""

from __future__ import annotations

import sys
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":  # where pytest.ini_options has tests import from
    sys.path[:0] = [str(HERE.parents[1] / part) for part in ("..", "support", "unit", "network")]

from adapt.golden_runs import SCRIPTS, output_of  # noqa: E402

GOLDENS = HERE / "goldens"


def golden(name: str) -> Path:
    return GOLDENS / f"{name}.jsonl"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_does_what_it_did(name: str, tmp_path: Path) -> None:
    kept, found = golden(name).read_text().splitlines(), output_of(name, tmp_path)
    diff = "\n".join(unified_diff(kept, found, f"goldens/{name}.jsonl", "now", n=1, lineterm=""))
    if diff:
        pytest.fail(
            f"if it is to be so, python {Path(__file__).name} writes it anew:\n{diff}", False
        )


def test_each_file_is_of_a_script() -> None:
    assert {path.name for path in GOLDENS.iterdir()} == {golden(name).name for name in SCRIPTS}


def write() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for old in GOLDENS.iterdir():
        old.unlink()
    for name in SCRIPTS:
        with TemporaryDirectory() as folder:
            golden(name).write_text("".join(f"{line}\n" for line in output_of(name, Path(folder))))


if __name__ == "__main__":
    write()
