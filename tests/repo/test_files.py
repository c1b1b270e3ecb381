"""Nothing of the user's is lost: a file is replaced as a whole, a folder is new, empty or ours."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from megatron_adaptra.base.errors import BadFile
from megatron_adaptra.base.files import MARKER, replacing, results_folder


def test_a_file_changes_when_the_new_one_is_complete(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to(path)
    with replacing(link) as one, replacing(link) as other:
        one.write_text("one")
        other.write_text("other")
        assert path.read_text() == "old"
    assert path.read_text() == "one"
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_a_file_stays_as_it_was_if_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with contextlib.suppress(ZeroDivisionError), replacing(path) as file:
        file.write_text("new")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_not_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    before = path.stat().st_ino
    with pytest.raises(OSError, match="no regular file"), replacing(path):
        pass
    assert path.stat().st_ino == before


def test_a_folder_of_results_is_new_or_empty_or_made_before(tmp_path: Path) -> None:
    for folder in (tmp_path / "a" / "new", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        assert results_folder(folder) == folder
        (folder / "plan.html").write_text("")
        results_folder(folder)
        assert sorted(p.name for p in folder.iterdir()) == [MARKER, "plan.html"]


def test_a_folder_with_something_else_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("the user's")
    with pytest.raises(BadFile, match=r"^--out '.*': it holds files that are not adaptra's; name"):
        results_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".hidden"]
    with pytest.raises(BadFile, match="it is no folder"):
        results_folder(tmp_path / ".hidden")
    with pytest.raises(BadFile, match="it cannot be written: Not a directory"):
        results_folder(tmp_path / ".hidden" / "deeper")
