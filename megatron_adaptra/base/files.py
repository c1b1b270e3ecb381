"""Files that are written for the user: nothing else of theirs is touched.

A file takes its place when it is complete. A folder of results is new, or empty, or one that an
earlier run has made, and marked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_adaptra.base.errors import BadFile

MARKER = ".adaptra-results"
_MARK = "adaptra has made this folder, and replaces the files that it writes here.\n"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`, for the block to write; then it takes the place of `path`.

    Nothing has changed if the block raises. Raises OSError where `path` cannot be written, as it is
    a device, say.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    there = path.exists()
    if there and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    if there and not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    partial = path.with_name(f".adaptra-{secrets.token_hex(8)}.partial")
    try:
        partial.touch(exist_ok=False)
        if there:
            shutil.copymode(path, partial)
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def results_folder(path: Path, flag: str = "--out") -> Path:
    """Make, and mark, the folder at `path`, which `flag` names; or take one made so before.

    Raises BadFile for a folder with files that adaptra has not made, and where none can be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / MARKER).is_file():
            if any(path.iterdir()):
                fault = "it holds files that are not adaptra's; name a new folder, or an empty one"
                raise BadFile(flag, path, fault)
            (path / MARKER).write_text(_MARK)
    except FileExistsError:
        raise BadFile(flag, path, "it is no folder; name a new one, or an empty one") from None
    except OSError as error:
        raise BadFile(flag, path, f"it cannot be written: {error.strerror}") from None
    return path
