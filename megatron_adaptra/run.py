"""Run a Megatron script, as it is, with the plugin's flags: `python -m megatron_adaptra.run`.

    torchrun --nproc-per-node 4 -m megatron_adaptra.run pretrain_gpt.py <its flags> --adaptra

Without `--adaptra` among the flags the script runs exactly as by itself.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra.errors import AdaptraError, BadFile, BadInput

USAGE = """\
usage: torchrun [its options] -m megatron_adaptra.run SCRIPT [the script's flags] [--adaptra ...]
       adaptra run [options of torchrun] SCRIPT [the script's flags] [--adaptra ...]

Runs a Megatron entry script (pretrain_gpt.py, pretrain_mamba.py, your own) from an unmodified
checkout. --adaptra switches the plugin on; SCRIPT --help lists all its flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script that `argv` begins with in this process, as one rank.

    Returns its exit status when it has ended.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    try:
        script = _script(words[0])
    except BadInput as error:
        return _refuse(error)
    sys.argv = words
    sys.path[0] = str(script.resolve().parent)  # as Python does for a script
    from megatron_adaptra.adapter.entry.register import register

    register()
    runpy.run_path(words[0], run_name="__main__")
    _leave_gloo()
    return 0


def _leave_gloo() -> None:
    """End gloo's threads before the interpreter does, as Megatron from 0.17 on does itself.

    Else a rank may abort after its last word: "terminate called without an active exception".
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    if distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def launch(words: Sequence[str]) -> int:
    """Run `adaptra run` with the `words` after it.

    Where something has started this process as a rank (RANK is set), it runs the script itself;
    else it becomes torchrun. A BadInput is printed, and the status is 2.
    """
    if not words or words[0] in ("-h", "--help") or "RANK" in os.environ:
        return main(words)
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    try:
        if at is None:
            raise BadInput("SCRIPT", None, "name a Python file, such as pretrain_gpt.py")
        _script(words[at])
    except BadInput as error:
        return _refuse(error)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words[:at]]
    os.execv(sys.executable, [*torchrun, "-m", "megatron_adaptra.run", *words[at:]])


def _script(name: str) -> Path:
    if not Path(name).is_file():
        raise BadFile("SCRIPT", name, "there is no such file")
    return Path(name)


def _refuse(error: AdaptraError) -> int:
    print(f"adaptra: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
