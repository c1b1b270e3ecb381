#!/usr/bin/env python3
"""Write docs/flags.md from the settings, and the tables of docs/megatron.md from the patches and
features.

Their sources are megatron_adaptra/config.py and megatron_adaptra/adapter/compat.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_adaptra.adapter.compat.features import FEATURES
from megatron_adaptra.adapter.compat.patches import PATCHES, Lasts
from megatron_adaptra.config import add_flags

DOCS = Path(__file__).parents[1] / "docs"
FLAGS, MEGATRON = DOCS / "flags.md", DOCS / "megatron.md"
HEAD = """\
# Flags of the plugin

Made by `scripts/write_docs.py` from `megatron_adaptra/config.py`; `pretrain_gpt.py --help` \
shows the same.

All but `--adaptra`, `--adaptra-dry-run` and `--adaptra-config` are also keys of the YAML file \
(`--adaptra-min-gain` is `min_gain`) and arguments of `megatron_adaptra.activate()`. Flags win \
over the file. A flag or a value that is misspelt ends the job with status 2, before it starts.

| flag | value | what it does |
|---|---|---|
"""


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by scripts/write_docs.py -->\n", f"<!-- end of {name} -->\n"


def flags_page() -> str:
    rows = []
    for action in add_flags(argparse.ArgumentParser(add_help=False))._actions:
        value = action.metavar or "|".join(action.choices or ()) or ""
        text = (action.help or "").replace("|", "\\|")
        value = value.replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}` | {value} | {text} |\n")
    return HEAD + "".join(rows)


def patches_table() -> str:
    rows = ["| what is patched | why | when | without it |\n", "|---|---|---|---|\n"]
    for lasts in Lasts:
        rows.append(f"| **{lasts.value}** | | | |\n")
        for name, entry in PATCHES.items():
            if entry.lasts is lasts:
                targets = "<br>".join(f"`{t.removeprefix('megatron.')}`" for t in entry.targets)
                of = f" of {entry.of}" if entry.of else ""
                off = f"off: {entry.feature}" if entry.feature else "trains as stock"
                rows.append(f"| {targets}{of} | `{name}`: {entry.why} | {entry.when} | {off} |\n")
    return "".join(rows)


def features_table() -> str:
    rows = [f"| {f.of} | {f.effect.value} | {f.why} |\n" for f in FEATURES]
    return "".join(["| of Megatron | what happens | why |\n", "|---|---|---|\n", *rows])


def megatron_page() -> str:
    page = MEGATRON.read_text()
    for name, table in (("patches", patches_table()), ("features", features_table())):
        begin, end = marks(name)
        before, rest = page.split(begin)
        page = before + begin + table + end + rest.split(end)[1]
    return page


def pages() -> dict[Path, str]:
    return {FLAGS: flags_page(), MEGATRON: megatron_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
