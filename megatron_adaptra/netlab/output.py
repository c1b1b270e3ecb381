"""Output that is read slowly, or by nobody: what moves packets does not wait for it."""

from __future__ import annotations

import os
import select

_AT_ONCE = select.PIPE_BUF  # bytes that a pipe takes without a wait, if it takes any
_MOST = 1 << 20  # bytes that may be left to write


class Output:
    """Keeps what the descriptor `fd`, which other processes share, does not take yet."""

    def __init__(self, fd: int) -> None:
        self._fd, self._left = fd, bytearray()

    def write(self, data: bytes) -> None:
        """Have `data` written by and by."""
        self._left += data

    def full(self) -> bool:
        """Write what is taken now; whether so much is left that no more should come."""
        while self._left and select.select([], [self._fd], [], 0)[1]:
            self._write()
        return len(self._left) > _MOST

    def drain(self) -> None:
        """Write all that is left, however long that takes."""
        while self._left:
            self._write()

    def _write(self) -> None:
        del self._left[: os.write(self._fd, self._left[:_AT_ONCE])]
