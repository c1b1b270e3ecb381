"""torchrun's agent, the process above a host's ranks, which leaves no folder behind.

    python .../base/package.py megatron_adaptra.launch.agent [--tmp FOLDER] <words of torchrun>

Its last line names the rank that has ended first, and why. A signal ends it with status 128 and the
signal's number. `--tmp`: the folder of the ranks' temporary files, which it removes, too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from tempfile import mkdtemp
from typing import Any, NoReturn

from megatron_adaptra.base.errors import AdaptraError, MissingPackage, line_of
from megatron_adaptra.base.log import log_line
from megatron_adaptra.launch.failures import consequence, ended_by

TMP = "--tmp"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(words: Sequence[str]) -> int:
    """Run ranks as torchrun does with these `words`; return the exit status."""
    tmp, words = (words[1], words[2:]) if words[:1] == [TMP] else ("", words)
    if importlib.util.find_spec("torch") is None:
        missing = MissingPackage("adaptra run", ["torch"], "torch")
        print(f"adaptra: error: {missing}", file=sys.stderr)
        return 2
    folder = tmp or mkdtemp(prefix="adaptra-")
    _end_on_signal(folder)
    try:
        if tmp:
            os.environ["TMPDIR"] = tmp
        return _run(words, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_on_signal(folder: str) -> None:
    """End the process on signals until torchrun handles them: it may first wait for hosts."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def handle(*_: object) -> None:
        """Do nothing: the thread below ends the process."""

    def watch() -> None:
        while number := reader.recv(1):
            if signal.getsignal(number[0]) is handle:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(128 + number[0])

    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for each in _SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, handle)
    threading.Thread(target=watch, name="adaptra-signals", daemon=True).start()


def _run(words: Sequence[str], folder: str) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        parser: Any = torchrun.get_args_parser()
        parser.error = _refuse
        args = parser.parse_args(words)
        if (args.log_dir, args.redirects, args.tee) == (None, "0", "0"):  # nobody wants its files
            args.log_dir = folder
        torchrun.run(args)
    except ChildFailedError as error:
        log_line(_first(error.failures))
        return 1
    except SignalException as error:
        log_line(f"interrupted by {signal.Signals(error.sigval).name}; all ranks have ended")
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except AdaptraError as error:
        print(f"adaptra: error: {line_of(error)}", file=sys.stderr)
        return 2
    except (AssertionError, OSError, ValueError) as error:  # how torchrun refuses a value
        print(f"adaptra: error: options of torchrun: {line_of(error)}", file=sys.stderr)
        return 2
    except Exception as error:  # a rendezvous that fails, say
        log_line(f"torchrun has failed: {type(error).__name__}: {line_of(error)}")
        return 1
    return 0


def _refuse(message: str) -> NoReturn:
    raise AdaptraError(f"options of torchrun: {line_of(message)}")


def _first(failures: Mapping[int, Any]) -> str:
    """Describe the first of the `failures`, by rank; consequences of another one come last."""

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        return consequence(_why(failure)), failure.error_file_data.get("at", failure.timestamp + 1)

    rank = min(sorted(failures), key=order)
    return ended_by(rank, _why(failures[rank]))


def _why(failure: Any) -> str:
    if failure.exitcode < 0:
        return str(failure.signal_name())
    message = failure.error_file_data.get("message")
    return message if "at" in failure.error_file_data else f"status {failure.exitcode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
