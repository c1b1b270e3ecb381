"""What the tests' zygote promises: ranks that meet, end with each other, and are not waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import living
from zygote import Zygote

MEET = """
import os, sys, torch, torch.distributed as dist
assert sys.argv[1:] == ["--a", "1"] and __name__ == "__main__"
dist.init_process_group("gloo")
sizes = torch.tensor([float(dist.get_rank())])
dist.all_reduce(sizes)
print("rank", os.environ["RANK"], "of", dist.get_world_size(), "sum", sizes.item())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(megatron=False) as made:
        yield made


def script(folder: Path, text: str) -> str:
    path = folder / "rank.py"
    path.write_text(text)
    return str(path)


def test_ranks_meet_and_each_has_a_file_of_its_own(zygote: Zygote, tmp_path: Path) -> None:
    done = zygote.run(tmp_path, [script(tmp_path, MEET), "--a", "1"], ranks=3)
    assert done.status == 0, done.text
    assert [text.split() for text in done.texts] == [
        ["rank", str(rank), "of", "3", "sum", "3.0"] for rank in range(3)
    ]


@pytest.mark.parametrize("ends", [True, False])
def test_its_interpreters_end_is_left_out_on_request(
    ends: bool, zygote: Zygote, tmp_path: Path
) -> None:
    text = (
        "import atexit, gc\n"
        "class Held:\n"
        "    def __del__(self): print('freed')\n"
        "held = Held()\n"
        "atexit.register(print, 'at exit')\n"
        "gc.freeze(), gc.unfreeze()\n"
        "assert gc.get_freeze_count() > 100_000, 'what the zygote has imported is set aside'"
    )
    done = zygote.run(tmp_path, [script(tmp_path, text)], ends=ends)
    assert done.status == 0, done.text
    assert done.text.split("\n") == ["at exit", *(["freed"] if ends else []), ""]


@pytest.mark.long
def test_ranks_end_with_one_that_fails_and_after_a_timeout_and_nothing_outlives_them(
    zygote: Zygote, tmp_path: Path
) -> None:
    """The last test here: one that comes after it starts the zygote anew."""
    text = "import os, signal\nif os.environ['RANK'] == '1': raise SystemExit(7)\nsignal.pause()"
    assert zygote.run(tmp_path, [script(tmp_path, text)], ranks=3).statuses == (-15, 7, -15)
    text = "import os, signal\nprint('process', os.getpid())\n"
    text += "if os.environ['RANK'] == '1': signal.pause()"
    with pytest.raises(TimeoutError, match=r"no end after 15 s of rank 1: process (\d+)") as error:
        zygote.run(tmp_path, [script(tmp_path, text)], ranks=2, timeout=15)
    assert not os.path.exists(f"/proc/{str(error.value).split()[-1]}")
    assert (process := zygote._process) is not None
    zygote.end()
    assert process.pid not in living("zygote.py")
