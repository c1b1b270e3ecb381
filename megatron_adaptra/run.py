"""Run a Megatron script, as it is, with the plugin's flags: `python -m megatron_adaptra.run`.

    torchrun --nproc-per-node 4 -m megatron_adaptra.run pretrain_gpt.py <its flags> --adaptra

Without `--adaptra` among the flags the script runs exactly as by itself.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_adaptra.base.errors import AdaptraError, BadFile, BadInput, line_of
from megatron_adaptra.base.log import log_line
from megatron_adaptra.base.package import SAFE_PATH, command, prefer_installed, script
from megatron_adaptra.base.units import whole
from megatron_adaptra.config import add_flags
from megatron_adaptra.launch.failures import recorded

USAGE = """\
usage: torchrun [its options] -m megatron_adaptra.run SCRIPT [the script's flags] [--adaptra ...]
       adaptra run [options of torchrun] SCRIPT [the script's flags] [--adaptra ...]

Runs a Megatron entry script (pretrain_gpt.py, pretrain_mamba.py, your own) from an unmodified
checkout. --adaptra switches the plugin on (docs/flags.md)."""
FLAG = "--adaptra"
_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun gives each rank
_SCRIPT = "name a Python file, such as pretrain_gpt.py (see adaptra run --help)"
_PORT = "it has to be a port: a whole number from 0 to 65535"
_ADDRESS = r"[^\s/]{1,253}"  # of a host


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script that `argv` begins with in this process, as one rank.

    Returns its exit status when it has ended; a BadInput is printed, and the status is 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help"):
        flags = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
        print(f"{USAGE}\n\n{add_flags(flags).format_help()}", end="")
        return 0
    try:
        if not words:
            raise BadInput("SCRIPT", None, _SCRIPT)
        check_rank(os.environ)
        path = _script(words[0])
        _check_flags(words[1:])
    except AdaptraError as error:
        return _refuse(error)
    sys.argv = words
    if not SAFE_PATH:
        sys.path[0] = str(path.resolve().parent)  # as Python does for a script
    from megatron_adaptra.adapter.entry.plugin import register

    register()
    try:
        with recorded():
            runpy.run_path(words[0], run_name="__main__")
        _leave_gloo()
    except SystemExit as ended:
        if not ended.code:
            _say_no_effect(words[1:])
        raise
    _say_no_effect(words[1:])
    return 0


def _check_flags(words: Sequence[str]) -> None:
    """Raise AdaptraError for a wrong flag of ours among a script's arguments, `words`.

    Megatron's own reading of flags would find it too, but a script need not use Megatron.
    """
    if any(word.startswith(FLAG) for word in words):
        from megatron_adaptra.adapter.entry.flags import read
        from megatron_adaptra.emulate import worker_rules
        from megatron_adaptra.emulate.scenario import check_rules
        from megatron_adaptra.plan.reductions.sized import plan_in_file

        # Only Megatron knows how many stages there are: any that the rules name may exist.
        if (config := read(words)[0]) is not None:
            check_rules(config.emulate_link)
            worker_rules.check_slowness(config.emulate_worker)
            plan_in_file(config.allreduce)


def _say_no_effect(words: Sequence[str]) -> None:
    """If `words` have flags of ours that changed nothing, log why, as the last line of rank 0."""
    ours = [word.partition("=")[0] for word in words if word.startswith(FLAG)]
    if not ours or os.environ.get("RANK", "0") != "0":
        return
    from megatron_adaptra.adapter.entry.plugin import PLUGIN

    what, why = FLAG, PLUGIN.had_no_effect()
    if FLAG not in ours:
        what, why = ", ".join(dict.fromkeys(ours)), f"only {FLAG} switches the plugin on"
    if why:
        log_line(f"{what} had no effect: {why}")


def _leave_gloo() -> None:
    """End gloo's threads before the interpreter ends, as Megatron from 0.17 on does itself.

    Else a rank whose script is over may abort: "terminate called without an active exception".
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    if distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def launch(words: Sequence[str]) -> int:
    """Run `adaptra run` with the `words` after it.

    Where a launcher has started this process as a rank (RANK is set), it runs the script itself;
    else it becomes torchrun's agent, which starts the ranks. Returns the exit status; a BadInput is
    printed in one line, and the status is 2.
    """
    if not words or words[0] in ("-h", "--help") or "RANK" in os.environ:
        return main(words)
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    try:
        if at is None:
            raise BadInput("SCRIPT", None, _SCRIPT)
        _script(words[at])
        _check_flags(words[at + 1 :])
    except AdaptraError as error:
        return _refuse(error)
    ranks = [*words[:at], *script(__spec__.name, *words[at:])]
    os.execv(sys.executable, command("megatron_adaptra.launch.agent", *ranks))


def check_rank(environment: Mapping[str, str], needed: str = "") -> None:
    """Raise BadInput for variables of a rank in the `environment` that torch cannot use.

    `needed`: why all have to be there, if they have to. Whether MASTER_ADDR can be resolved is not
    checked: in a cluster a name may appear later, and torch waits for it.
    """
    for name in _RANK:
        if needed and name not in environment:
            raise BadInput(name, None, needed)
    least = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}
    given: dict[str, int] = {}
    for name in (name for name in least if name in environment):
        value = environment[name]
        try:
            given[name] = whole(value)
        except ValueError:
            raise BadInput(
                name, value, "it has to be a whole number, as torchrun sets it"
            ) from None
        if given[name] < least[name]:
            raise BadInput(name, value, f"it has to be at least {least[name]}")
    if given.get("MASTER_PORT", 0) > 65535:
        raise BadInput("MASTER_PORT", given["MASTER_PORT"], _PORT)
    if given.get("RANK", 0) >= given.get("WORLD_SIZE", sys.maxsize):
        allowed = f"it has to be less than WORLD_SIZE, {given['WORLD_SIZE']}"
        raise BadInput("RANK", given["RANK"], allowed)
    address = environment.get("MASTER_ADDR", "localhost")
    if re.fullmatch(_ADDRESS, address) is None:
        raise BadInput("MASTER_ADDR", address, "it has to be the name or the address of a host")


def _script(name: str) -> Path:
    """The path of the script `name`, if that can be read and compiled; raises BadFile."""
    path = Path(name)
    try:
        if not path.is_file():
            raise BadFile("SCRIPT", name, "there is no such file")
        if path.suffix == ".py":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each rank prints them
                compile(path.read_bytes(), name, "exec", dont_inherit=True)
    except OSError as error:
        raise BadFile("SCRIPT", name, f"it cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadFile("SCRIPT", name, f"it is not Python: {line_of(error)}") from None
    return path


def _refuse(error: AdaptraError) -> int:
    """Print the `error`; returns the exit status."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one line from each machine
        print(f"adaptra: error: {line_of(error)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    prefer_installed(__spec__.name)
    sys.exit(main())
