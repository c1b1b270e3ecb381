"""The examples in docs/extending run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

GUIDES = sorted((Path(__file__).parents[1] / "docs" / "extending").glob("[a-z]*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_example_of_a_guide_runs(page: Path) -> None:
    """In a process of its own: it registers policies and patches."""
    example = "".join(PYTHON.findall(page.read_text()))
    assert "assert" in example
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
