#!/usr/bin/env python3
"""Megatron's flags of a model file, one word per line, for bash's `mapfile`:

    mapfile -t flags < <(scripts/megatron_flags.py gpt_7b --set train-iters=100)

MODEL is a YAML file, or the name of one in configs/models. Its keys are Megatron's flags without
`--`. `true` makes a bare flag, `false` leaves it out, a list gives several values.
Exit status 2 and one line on bad input. Needs nothing but PyYAML.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from megatron_adaptra.base.errors import BadFile, line_of, shown  # noqa: E402
from megatron_adaptra.base.user_files import parse_yaml, read_data  # noqa: E402

MODELS = ROOT / "configs" / "models"


class BadInput(Exception):
    """What is wrong, the value, what is allowed."""


def load(model: str) -> dict[str, object]:
    """The flags of a model, by name with dashes."""
    path = Path(model)
    if not path.suffix:
        path = MODELS / f"{model}.yaml"
    if path.parent == MODELS and not path.is_file():
        known = ", ".join(sorted(file.stem for file in MODELS.glob("*.yaml")))
        raise BadInput(f"{shown(model)}: no such model; give a YAML file or one of: {known}")
    try:
        content = read_data(path, "MODEL")
    except BadFile as error:
        raise BadInput(line_of(error)) from None
    if not isinstance(content, dict) or not content:
        raise BadInput(f"{path}: it has to be a mapping of Megatron's flags, such as lr: 1.0e-4")
    flags: dict[str, object] = {}
    for key, value in content.items():
        try:
            name = flag_name(key)
            if name in flags:
                raise BadInput(f"{name}: set twice, with dashes and with underscores")
            flags[name] = checked(name, value)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
    return flags


def flag_name(key: object) -> str:
    if not isinstance(key, str) or not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", key):
        raise BadInput(f"{shown(key)}: write a flag of Megatron's without --, such as num-layers")
    return key.replace("_", "-")


def checked(name: str, value: object) -> object:
    """The value, if it can stand on a command line."""
    parts = value if isinstance(value, list) else [value]
    if not parts or (isinstance(value, list) and any(isinstance(part, bool) for part in parts)):
        raise BadInput(f"{name}: {shown(value)}: a list has to hold numbers or words")
    for part in parts:
        good = isinstance(part, (bool, float, str)) or (
            isinstance(part, int) and abs(part) < 10**30
        )
        if not good or not str(part) or "\n" in str(part):
            raise BadInput(
                f"{name}: {shown(part)}: allowed are true, false, numbers, words and lists"
            )
    return value


def words(flags: dict[str, object]) -> Iterator[str]:
    """The command line."""
    for name, value in flags.items():
        if value is True:
            yield f"--{name}"
        elif isinstance(value, list):
            yield from (f"--{name}", *map(str, value))
        elif value is not False:
            text = str(value)
            # argparse would take a value that starts with a dash for the next flag.
            yield from ([f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text])


def check_world(flags: dict[str, object], world: int) -> None:
    """Refuse before the start what Megatron would refuse after a minute on every rank."""

    def size(name: str) -> int:
        value = flags.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"{name}: {value!r}: it has to be a whole number from 1")
        return value

    tensor, stages, context = (
        size(f"{kind}-parallel-size") for kind in ("tensor-model", "pipeline-model", "context")
    )
    replica = tensor * stages * context
    if world % replica:
        raise BadInput(
            f"{world} processes do not divide into replicas of {replica} (tensor {tensor} x "
            f"pipeline {stages} x context {context}); start a multiple of {replica}, or change the "
            "sizes, as with --set pipeline-model-parallel-size=4"
        )
    if "global-batch-size" in flags:
        batch = size("global-batch-size")
        share = size("micro-batch-size") * (world // replica)
        if batch % share:
            raise BadInput(
                f"global-batch-size: {batch}: it has to be a multiple of {share} (micro-batch-size "
                f"x {world // replica} data-parallel replicas), as with "
                f"--set global-batch-size={share * max(1, round(batch / share))}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--world", type=int, metavar="N", help="check the sizes for N processes")
    parser.add_argument("-0", action="store_true", dest="nul", help="end words with NUL")
    options = parser.parse_args()
    try:
        flags = load(options.model)
        for setting in options.settings:
            key, equals, text = setting.partition("=")
            if not equals:
                raise BadInput(f"--set {setting}: write KEY=VALUE, such as train-iters=100")
            name = flag_name(key)
            try:
                flags[name] = checked(name, parse_yaml(text))
            except ValueError:
                raise BadInput(f"--set {setting}: {text!r} is not a YAML value") from None
        if options.world is not None:
            check_world(flags, options.world)
    except BadInput as error:
        print(f"megatron_flags: {error}", file=sys.stderr)
        return 2
    for word in words(flags):
        sys.stdout.write(word + ("\0" if options.nul else "\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
