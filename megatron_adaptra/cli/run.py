"""`adaptra run`: its line in the help; main() hands the words on as they are."""

from __future__ import annotations

from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    subparsers.add_parser("run", help="run a Megatron script with the plugin's --adaptra flags")
