"""Settings of every test, and what is printed at the end of a run.

A failing hypothesis example prints the blob that reproduces it.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from multiprocessing.util import Finalize
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["inconclusive"]

settings.register_profile(
    "adaptra",
    max_examples=60,
    deadline=None,  # the machine is shared, so seconds mean nothing
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("the same", settings.get_profile("adaptra"), derandomize=True)
settings.register_profile("quick", settings.get_profile("the same"), max_examples=15)

# Tests of one of these files share trainings, or a machine; in test_schedules.py those of a layout.
# With --quick most that train are of one process, and so forks of one zygote.
# They are started in this order: those that take longest first.
LONGEST = ("train/test_pretrain.py", "train/test_demo.py")  # of the short run
SHARING = (
    *LONGEST,
    "soft_roce/test_verbs.py", "train/test_routes_pretrain.py",
    "train/test_law.py", "train/test_executor_training.py",
    "fake_cuda/test_fake_adaptation.py", "fake_cuda/test_fake_trainings.py",
    "train/test_iteration_end.py",
    "train/test_schedules.py", "launch/test_documented_commands.py",
    "train/test_found_counts.py", "train/test_slow_worker.py",
    "execute/test_ddp_hook.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the large sizes and whole products, too")
    parser.addoption(
        "--quick", action="store_true", help="leave out cold, crowd, long, quiet, timing and vm"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The same examples in every run, so that none fails by chance; others with --full."""
    quick = "quick" if config.getoption("--quick") else "the same"
    settings.load_profile("adaptra" if config.getoption("--full") else quick)
    if not hasattr(config, "workerinput"):  # those of xdist have their environment from here
        _own_temporary_folder()


def _own_temporary_folder() -> None:
    """What torch leaves in the temporary folder goes with the run; folders of tests stay."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="adaptra-tests-")
    os.chmod(folder, 0o711)  # tests become other users
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing's own folder in it, whose removal has priority -100.
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-101)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.config.getoption("--full"):
        random.seed(item.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What the mode leaves out is deselected, which the last line of a run counts."""
    config.collecting_imported_megatron = "megatron.core" in sys.modules  # type: ignore[attr-defined]
    left_out = set() if config.getoption("--full") else {"large"}
    if config.getoption("--quick"):
        left_out |= {"cold", "crowd", "long", "quiet", "timing", "vm"}
    chosen, others = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        (others if marks & left_out else chosen).append(item)
    if others:
        items[:] = chosen
        config.hook.pytest_deselected(items=others)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: started(item.nodeid))


def pytest_collection_finish() -> None:
    """Modules and tests stay: no collection of garbage has to look through them."""
    gc.freeze()


def started(nodeid: str) -> int:
    """Its turn among several processes: a long chain that is started last is waited for."""
    path = nodeid.partition("::")[0]
    return next((turn for turn, file in enumerate(SHARING) if path.endswith(file)), len(SHARING))


def scope(nodeid: str, quick: bool) -> str:
    """What goes to one process together."""
    path, _, name = nodeid.partition("::")
    if quick and "/train/" in path:
        return path if path.endswith(LONGEST) else "trainings"
    if quick:  # what a file's tests share is made once
        return path
    if not path.endswith(SHARING):
        return nodeid
    layout = name.partition("[")[2].partition(" ")[0]
    return f"{path} {layout}" if path.endswith("test_schedules.py") else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share trainings go to one process; all others wherever there is time.

    xdist's own groups (--dist loadgroup) are lost with pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid, config.getoption("--quick"))

    config.option.loadscopereorder = False  # not by how many they are
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many were skipped and why, each reason once: nothing is skipped silently.

    Before, a line for each test that has recorded an ending.
    """
    stats = terminalreporter.stats
    endings = [
        str(value)
        for report in (*stats.get("passed", []), *stats.get("failed", []))
        for name, value in report.user_properties
        if name == "ending"
    ]
    if endings:
        terminalreporter.write_sep("=", f"{len(endings)} endings")
    for ending in sorted(endings):
        terminalreporter.write_line(f"| {ending} |")
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        _, _, why = report.longrepr
        reasons[why.removeprefix("Skipped: ")] += 1
    terminalreporter.write_sep("=", f"{sum(reasons.values())} skipped")
    for why, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4d}  {why}")
