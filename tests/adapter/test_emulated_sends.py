"""Messages of Megatron's own schedule over emulated links: late, and never lost."""

from __future__ import annotations

import re
from pathlib import Path

from running import zygote

HERE = Path(__file__).parent


def test_what_an_iteration_sends_last_comes_after_its_end(tmp_path: Path) -> None:
    """However late it is received, and although nothing follows at the end of the job."""
    done = zygote(False).run(tmp_path, [str(HERE / "emulated_sends_script.py")], ranks=2)
    assert done.status == 0, done.text[-3000:]
    found = re.findall(r"^came (.*)", done.text, re.MULTILINE)
    assert found == [" ".join(map(str, [*range(20), 21]))]
