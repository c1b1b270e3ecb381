"""What is tested in the virtual machine, by name: `CASES`.

Each raises what is wrong, and returns what may interest a reader. `Size.full`: as much as the
engine's failure suite asks for, 200 messages and a minute without a rail; else a part of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Size:
    full = False


CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function
