"""Start the demo's ranks with torchrun, show their progress, and leave nothing behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import AdaptraError, BadFile, MissingPackage
from megatron_adaptra.base.files import MARKER, results_folder
from megatron_adaptra.base.package import command
from megatron_adaptra.demo.options import ENVIRONMENT, LAUNCHED, PROGRESS, DemoOptions
from megatron_adaptra.demo.stopping import Stop
from megatron_adaptra.launch.failures import reason
from megatron_adaptra.launch.torchrun import run_ranks
from megatron_adaptra.netlab.lab import Lab
from megatron_adaptra.netlab.user import give
from megatron_adaptra.view.summary import Summary

_WORKER = "megatron_adaptra.demo.worker"
_LINES_AHEAD = 1000  # of the ranks' output that wait for a slow reader
_HOST = {"torch": "torch", "megatron.core": "megatron-core"}  # module: package
RESULTS = ("ranks.log", "summary.json", "decisions.jsonl", "timeline.json", "report.html")
_EXTRA = ("einops", "packaging", "regex", "six")  # what these import

OnLine = Callable[[str], None]


def require_megatron() -> None:
    """Raise, before anything starts, unless all packages are there that the ranks will import.

    MissingPackage names what is missing, UnsupportedMegatron the releases that are known.
    """
    host = [package for module, package in _HOST.items() if not _installed(module)]
    extra = [module for module in _EXTRA if not _installed(module)]
    if host or extra:
        install = " ".join([*host, *(["'megatron-adaptra[demo]'"] if extra else [])])
        raise MissingPackage("adaptra demo", [*host, *extra], install)
    from megatron_adaptra.adapter.compat.profiles import profile

    profile()


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def prepare(options: DemoOptions) -> Path:
    """Return the folder for the results, after those of an earlier run are removed.

    Raises BadFile for a folder with files of others, and where nothing can be written.
    """
    out = results_folder(Path(options.out))
    try:
        for stale in [
            *map(out.joinpath, RESULTS),
            *out.glob("replica-*.jsonl"),
            *out.glob("decisions.*.jsonl"),
            out / "sync.jsonl",
            out / "report.png",  # which versions before this one wrote
        ]:
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise BadFile("--out", str(out), f"it cannot be written: {error}") from None
    return out


def launch(
    options: DemoOptions, out: Path, on_progress: Callable[[dict[str, Any]], None]
) -> Summary:
    """Run all ranks on this machine; return the summary. Raises AdaptraError when a rank failed.

    SIGTERM or SIGINT ends the run before its next iteration, with what there is; a second one, or
    one in the first iterations, at once, with Interrupted.

    `out`: as `prepare` has left it; BadFile for a disk that fills up. `on_progress` gets one dict
    per iteration: `iteration`, `ms` by arm, `warmup` by stage. What the ranks print goes to
    `out`/ranks.log.
    """
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": "1", LAUNCHED: "1", **os.environ}
    with (
        out.joinpath("ranks.log").open("xb", buffering=0) as log,
        tempfile.TemporaryDirectory(prefix="data-", dir=out, ignore_cleanup_errors=True) as data,
    ):

        def on_line(line: str) -> None:
            """Report a line of progress; all others go to the log."""
            step = _progress(line)
            if step is not None:
                stop.iterations += 1
                on_progress(step)
                return
            try:
                log.write(line.encode(errors="replace"))
            except OSError as error:  # a full disk, on which there will be no results either
                fault = f"it cannot be written: {error.strerror}"
                raise BadFile("--out", str(log.name), fault) from None

        if options.netlab:
            give(out, *map(Path, (out / MARKER, log.name, data)))
        run = _in_lab if options.netlab else _with_torchrun
        stop = Stop(Path(data))
        try:
            status = run(replace(options, data=data), environment, on_line, stop)
        finally:
            stop.close()
    if status or not out.joinpath("summary.json").exists():
        with out.joinpath("ranks.log").open(encoding="utf-8", errors="replace") as lines:
            why = reason(lines, status)
        raise AdaptraError(f"{why} (all that the ranks printed: {out / 'ranks.log'})")
    summary: Summary = json.loads(out.joinpath("summary.json").read_text())
    return summary


def _progress(line: str) -> dict[str, Any] | None:
    """Return the step that a line reports; None for other lines, and for two ranks' in one line."""
    with contextlib.suppress(ValueError):
        step = json.loads(line.removeprefix(PROGRESS)) if line.startswith(PROGRESS) else None
        if isinstance(step, dict) and step.keys() == {"iteration", "ms", "warmup"}:
            return step
    return None


def _with_torchrun(
    options: DemoOptions, environment: Mapping[str, str], on_line: OnLine, stop: Stop
) -> int:
    words = [options.dump()]
    return run_ranks(options.world, _WORKER, words, environment, on_line, stop.on_signal)


def _in_lab(
    options: DemoOptions, environment: Mapping[str, str], on_line: OnLine, stop: Stop
) -> int:
    """Run one rank per host of a laboratory, whose links change at given iterations."""
    handed: deque[Future[None]] = deque()
    # Packets must not wait for a terminal that nobody reads.
    rules, ports = options.host_rules, options.port_rules
    with (
        Lab(options.world, rules, options.seed, ports=ports) as lab,
        ThreadPoolExecutor(1) as pool,
    ):

        def of_host(_: int, line: bytes) -> None:
            text = line.decode(errors="replace") + "\n"
            if (step := _progress(text)) is not None:
                lab.iteration = step["iteration"] + 1
            handed.append(pool.submit(on_line, text))

        def full() -> bool:
            while handed and handed[0].done():
                handed.popleft().result()
            return len(handed) > _LINES_AHEAD

        words = command(_WORKER, options.dump())
        variables = {**environment, "TMPDIR": os.path.abspath(options.data)}
        status = max(lab.run(words, variables, of_host, full=full, on_signal=stop.on_signal))
        for line in handed:
            line.result()
    return status
