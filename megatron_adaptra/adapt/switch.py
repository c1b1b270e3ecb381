"""The switch of a running job: whether what its remedies propose is put to the vote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megatron_adaptra.base.errors import BadFile
from megatron_adaptra.base.log import LogOnce, log_line
from megatron_adaptra.base.user_files import read_text
from megatron_adaptra.config import AdaptraConfig

Acts = Callable[[], bool]  # asked once an iteration, beside the training
_FIELD = "--adaptra-act-file"
_MOST_BYTES = 64
_WORDS = {"on": True, "off": False}


def always() -> bool:
    """Return True, for a job without a switch."""
    return True


def never() -> bool:
    """Return False, for a job that only observes."""
    return False


class Switch:
    """A switch turns acting off and on as a file asks, which is read when it has changed.

    Without the file a job acts. While it cannot be read, or holds anything but `on` or `off`,
    acting stays as it is, with one line for each reason. Any thread may call it.

    Args:
        path: of the file.
        who: this rank and its host, in the log.
        speaks: this process logs each change, as that of rank 0 does.
    """

    def __init__(self, path: Path, who: str, speaks: bool) -> None:
        self._path, self._who, self._speaks = path.absolute(), who, speaks
        self._on = True
        self._seen: tuple[int, ...] = ()  # of the file as it was read last
        self._once = LogOnce()

    def __call__(self) -> bool:
        """Return whether to act now; waits for the file system."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._seen = ()
            self._turn(True, f"there is no file {str(self._path)!r}")
            return self._on
        except (OSError, ValueError) as error:
            self._stays(str(error))
            return self._on
        seen = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        if seen != self._seen:
            self._seen = seen
            self._read()
        return self._on

    def _read(self) -> None:
        try:
            word = read_text(self._path, _FIELD, _MOST_BYTES).strip().lower()
        except BadFile as error:
            self._seen = ()  # once more, as the file system may answer again
            self._stays(str(error))
            return
        if word in _WORDS:
            self._turn(_WORDS[word], f"{str(self._path)!r} holds {word}")
        else:
            self._stays(f"{_FIELD} {str(self._path)!r} holds {word!r}: it has to be on or off")

    def _turn(self, on: bool, why: str) -> None:
        before, self._on = self._on, on
        if on != before and self._speaks:
            log_line(f"{self._who}: acting is {'on' if on else 'off'}: {why}")

    def _stays(self, reason: str) -> None:
        text = f"{self._who}: acting stays {'on' if self._on else 'off'}: {reason}"
        self._once.line(text, about=reason)


def acts_of(config: AdaptraConfig, who: str, speaks: bool) -> Acts:
    """Return whether a job with these settings acts, as a function; `who`, `speaks`: see Switch."""
    if config.observes:
        return never
    return Switch(Path(config.act_file), who, speaks) if config.act_file else always
