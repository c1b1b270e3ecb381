"""Waits for events in the product's sources, and an engine without one of them."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys

from fakes.hostile_cuda.build import ENGINE, built_engine

_MODULE = "megatron_adaptra.transport.engine._native"
NAME = re.compile(r'"((?:send|receive|clock|mark|abort|close|memory): [a-z\' ]+)"')


def names() -> list[str]:
    """Of all waits, as the engine's sources have them."""
    return sorted(
        {n for path in sorted(ENGINE.rglob("*.cpp")) for n in NAME.findall(path.read_text())}
    )


class Engine:
    """Stands in for the installed engine, of which it is a copy; before anything imports that."""

    def __init__(self) -> None:
        assert _MODULE not in sys.modules
        library = str(built_engine())
        spec = importlib.util.spec_from_file_location(_MODULE, library)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_MODULE] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._library = ctypes.CDLL(library)
        self._library.test_removed_times.restype = ctypes.c_uint64

    def remove(self, wait: str) -> None:
        """Only between jobs; an empty name puts all back."""
        self._library.test_remove_wait(wait.encode())

    @property
    def times(self) -> int:
        """How often the wait that is gone would have been waited."""
        return int(self._library.test_removed_times())
