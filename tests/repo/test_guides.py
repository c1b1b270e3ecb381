"""The examples in docs/extending run as they stand there."""

import re
from pathlib import Path

import pytest
from apart import apart

GUIDES = sorted((Path(__file__).parents[2] / "docs" / "extending").glob("[a-z]*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(example: str, page: str) -> None:
    exec(compile(example, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_example_of_a_guide_runs(page: Path) -> None:
    """In a process of its own: it registers policies and patches."""
    example = "".join(PYTHON.findall(page.read_text()))
    assert "assert" in example
    apart(run, example, page.name)
