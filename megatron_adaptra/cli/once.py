"""Flags that are given once: a value after another one would be ignored without a word."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_adaptra.base.errors import BadInput, shown


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, by their names in the `namespace`."""
    known: dict[str, Any] = vars(namespace).setdefault("given_flags", {})
    return known


class Once(argparse.Action):
    """Keeps a value; raises BadInput for another value after it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep `values`."""
        if given(namespace).setdefault(self.dest, values) != values:
            both = f"{shown(given(namespace)[self.dest])} and {shown(values)}"
            raise BadInput(option_string or self.dest, values, f"it is given twice, {both}")
        vars(namespace)[self.dest] = values
