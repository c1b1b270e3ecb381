"""Between two endpoints: what they send goes through here."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.folder_rendezvous import FolderRendezvous

Change = Callable[[int, bool, bytes], bytes]  # of a connection, from its dialer, what


class Wiretap(FolderRendezvous):
    """Gives our address for rank 0's; `change` sees what crosses, and passes on what it likes."""

    def __init__(self, folder: Path, change: Change) -> None:
        super().__init__(folder)
        self._change = change
        self._server = socket.create_server(("127.0.0.1", 0))
        self._real = "", 0
        threading.Thread(target=self._run, daemon=True).start()

    def get(self, key: str) -> str | None:
        text = super().get(key)
        if key != "address/0" or text is None:
            return text
        address = json.loads(text)
        self._real = address["host"], address["port"]
        return json.dumps({**address, "port": self._server.getsockname()[1]})

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            for number in range(1 << 30):
                dialer, _ = self._server.accept()
                listener = socket.create_connection(self._real)
                for one in (dialer, listener):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for dials, a, b in ((True, dialer, listener), (False, listener, dialer)):
                    arguments = number, dials, a, b
                    threading.Thread(target=self._pass, args=arguments, daemon=True).start()

    def _pass(self, number: int, dials: bool, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                b.sendall(self._change(number, dials, data))
        for one in (a, b):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
