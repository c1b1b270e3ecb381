"""Messages of Megatron's own schedule over emulated links: late, and never lost."""

from __future__ import annotations

import json
import re
from pathlib import Path

from running import zygote

HERE = Path(__file__).parent


def test_what_an_iteration_sends_last_comes_after_its_end(tmp_path: Path) -> None:
    """However late it is received, and although nothing follows at the end of the job."""
    done = zygote(False).run(tmp_path, [str(HERE / "ranks" / "late_sends_script.py")], ranks=2)
    assert done.status == 0, done.text[-3000:]
    found = re.findall(r"^came (.*)", done.text, re.MULTILINE)
    assert found == [" ".join(map(str, [*range(20), 21]))]


def test_megatrons_own_schedules_are_as_slow_as_their_links(tmp_path: Path) -> None:
    """Also where messages overlap, and where engine native leaves the schedule to Megatron."""
    words = [str(HERE / "ranks" / "emulated_links_script.py"), str(tmp_path)]
    done = zygote(False).run(tmp_path, words, ranks=2)
    assert done.status == 0, done.text[-3000:]
    found = [json.loads(line) for line in re.findall(r"^FOUND (.*)", done.text, re.MULTILINE)]
    assert len(found) == 2
    for one in found:
        assert one["same"] == [True, True], one
        assert min(one["slow"]) >= one["least"], one
