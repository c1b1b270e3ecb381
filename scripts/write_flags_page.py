#!/usr/bin/env python3
"""Write docs/flags.md from megatron_adaptra/config.py, the one source of all settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_adaptra.config import add_flags

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"
HEAD = """\
# Flags of the plugin

Made by `scripts/write_flags_page.py` from `megatron_adaptra/config.py`; `pretrain_gpt.py --help` \
shows the same.

All but `--adaptra`, `--adaptra-dry-run` and `--adaptra-config` are also keys of the YAML file \
(`--adaptra-min-gain` is `min_gain`) and arguments of `megatron_adaptra.activate()`. Flags win \
over the file. A flag or a value that is misspelt ends the job with status 2, before it starts.

| flag | value | what it does |
|---|---|---|
"""


def page() -> str:
    rows = []
    for action in add_flags(argparse.ArgumentParser(add_help=False))._actions:
        value = action.metavar or "|".join(action.choices or ()) or ""
        text = (action.help or "").replace("|", "\\|")
        value = value.replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}` | {value} | {text} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
