"""Our flags in Megatron's own parser, and what of Megatron does not go with them."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_adaptra.base.errors import AdaptraError, BadInput
from megatron_adaptra.base.log import log_line
from megatron_adaptra.config import AdaptraConfig, add_flags

# Megatron's settings under which the plugin must not run, and why.
_REFUSED = {
    "inprocess_restart": "it makes the process groups anew under the plugin's connections; restart "
    "the job with torchrun's --max-restarts",
    "perform_rl_step": "reinforcement learning runs the pipeline outside the training loop",
    "use_legacy_models": "Megatron's legacy models have no schedule that the plugin can drive",
}
_PREFIX = "--adaptra"


class _Own(argparse.ArgumentParser):
    """Our flags alone, so that a mistake in them ends in one line, not in Megatron's usage."""

    def error(self, message: str) -> NoReturn:
        raise AdaptraError(message)


def read(argv: Sequence[str]) -> tuple[AdaptraConfig | None, list[str]]:
    """Read a command line's words, `argv`: our settings, None without `--adaptra`, and the rest.

    Raises AdaptraError for a flag or a value that is misspelt, with `--adaptra` or without.
    """
    parser = add_flags(_Own(prog="", add_help=False, allow_abbrev=False))
    known, rest = parser.parse_known_args(list(argv))
    flags = [text for action in parser._actions for text in action.option_strings]
    for word in rest:
        if word.startswith(_PREFIX):
            name = word.partition("=")[0]
            near = difflib.get_close_matches(name, flags, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(flags)}"
            raise AdaptraError(f"unknown flag {name}; {hint}")
    config = AdaptraConfig.from_args(known)
    return config if known.adaptra else None, rest


def with_ours(provider: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """An `extra_args_provider` for Megatron: the user's own, `provider`, then our group."""

    def add(parser: Any) -> Any:
        return add_flags(provider(parser) if provider is not None else parser)

    return add


def refuse(args: Any) -> None:
    """Raise BadInput for a setting among Megatron's, `args`, that the plugin does not go with."""
    if not hasattr(args, "adaptra"):
        raise BadInput("--yaml-cfg", args.yaml_cfg, "it replaces all flags, ours too: use flags")
    for name, reason in _REFUSED.items():
        if getattr(args, name, False):
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(flag, True, f"leave it out, or leave out --adaptra: {reason}")


def fail(error: AdaptraError) -> NoReturn:
    """End this rank with status 2, and one line from each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log_line(str(error))
    sys.exit(2)
