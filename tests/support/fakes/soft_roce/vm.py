"""A virtual machine with soft-RoCE devices, that sees this machine's files and changes none."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
_PREPARE = 900  # seconds, downloads among them
# Seconds without a pulse, which is there all 2 s once the machine has started (12 s on an idle
# host). A busy host makes this 10 times slower.
FROZEN = 240.0


class FrozenError(RuntimeError):
    """The whole machine stands still, its kernel too: no process in it can do that."""


@lru_cache
def prepared() -> tuple[Path | None, str]:
    """The folder with its kernel, or why there is none."""
    if os.geteuid() != 0:
        return None, "no virtual machine with RDMA devices: this needs root, to install packages"
    try:
        done = subprocess.run(
            [HERE / "prepare.sh"], capture_output=True, text=True, timeout=_PREPARE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"no virtual machine with RDMA devices: {error}"
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return None, f"no virtual machine with RDMA devices: {words[-1]}"
    return Path(done.stdout.splitlines()[-1]), ""


def boot(made: Path, exchange: Path, script: str, seconds: float, frozen: float = FROZEN) -> str:
    """Run `script` (bash) as root in the machine; what it has printed.

    `made`: of `prepared`. `exchange`: a folder, in the machine /exchange, where both may write.
    Raises RuntimeError if the script fails, or the machine does, and FrozenError if the machine
    has shown no life for `frozen` seconds.
    """
    (exchange / "guest.sh").write_text(script)
    for old in ("status", "pulse"):
        (exchange / old).unlink(missing_ok=True)
    console = exchange / "console.txt"
    # qemu dies with this process, however that ends. It emulates the processor: where /dev/kvm can
    # be opened it need not work.
    command = [
        "setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64",
        "-machine", "q35", "-accel", "tcg,thread=multi",
        "-cpu", "max,-erms,-fsrm",  # without instructions whose emulation copies byte by byte
        "-smp", "2", "-m", "3G",
        # Two NUMA nodes, both processors on the first.
        "-object", "memory-backend-ram,id=near,size=2G", "-numa", "node,memdev=near,cpus=0-1",
        "-object", "memory-backend-ram,id=far,size=1G", "-numa", "node,memdev=far",
        "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none",
        # Time comes from the host's clock (hpet): a kernel that starts on a busy host takes its
        # counter of cycles for several times slower than it is, and hours pass in minutes.
        "-kernel", str(made / "kernel"), "-initrd", str(made / "initrd"),
        "-append", "console=ttyS0 quiet mitigations=off nokaslr tsc=unstable clocksource=hpet "
        "no_timer_check panic=-1 oops=panic",
        "-serial", f"file:{console}", "-monitor", "stdio",
        "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        "-virtfs", f"local,path={exchange},mount_tag=exchange,security_model=none,multidevs=remap",
        "-device", "virtio-rng-pci",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as machine:
        try:
            failure = _ended(machine, exchange / "pulse", seconds, frozen)
        finally:
            machine.kill()
    output = console.read_text(errors="replace") if console.exists() else ""
    status = exchange / "status"
    if not status.exists():
        raise type(failure)(f"the virtual machine failed: {failure}\n{output}")
    if (code := status.read_text().strip()) != "0":
        raise RuntimeError(f"in the virtual machine: status {code}\n{output}")
    return output


def _ended(
    machine: subprocess.Popen[bytes], pulse: Path, seconds: float, frozen: float
) -> RuntimeError:
    """How it has ended, or why it is not waited for any longer."""
    start = beat = time.monotonic()
    last = ""
    while time.monotonic() < start + seconds:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return RuntimeError(f"qemu ended with status {machine.wait(0.5)}")
        now = pulse.read_text() if pulse.exists() else ""
        if now and now != last:
            last, beat = now, time.monotonic()
        elif time.monotonic() > beat + frozen:
            when = f"after {last.split()[0]} s" if last else "before its first process"
            where = _processors(machine)
            return FrozenError(f"frozen {when}, no life for {frozen:g} s: {where}")
    return RuntimeError(f"it did not end within {seconds:g} s")


def _processors(machine: subprocess.Popen[bytes]) -> str:
    """Where its processors are, for who looks for the cause."""
    used = sum(map(int, Path(f"/proc/{machine.pid}/stat").read_text().split()[13:15]))
    try:
        registers, _ = machine.communicate(b"info registers -a\nquit\n", timeout=10)
    except subprocess.TimeoutExpired:
        registers = b"qemu itself does not answer"
    lines = registers.decode(errors="replace").splitlines()
    kept = [line for line in lines if line.startswith(("CPU#", "RIP", "qemu"))]
    return "; ".join([f"qemu has used {used / os.sysconf('SC_CLK_TCK'):.0f} s of CPU", *kept])


def run_cases(
    made: Path, exchange: Path, names: list[str], full: bool, seconds: float,
    boot: Callable[[Path, Path, str, float], str] = boot,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Run cases of network/soft_roce, all in one machine; guest.py's outcome of each, by name.

    If the machine freezes, a new one goes on with the case that it froze in; if a case makes it
    freeze twice, or does not end, that one has failed, and a new machine goes on with the next.
    `seconds`: for all of them. Raises RuntimeError if no case can be run.
    """
    end = time.monotonic() + seconds
    found: dict[str, dict[str, Any]] = {}
    freezes: Counter[str] = Counter()
    path = exchange / "outcomes"
    while rest := [name for name in names if name not in found]:
        path.unlink(missing_ok=True)
        command = [sys.executable, "tests/support/fakes/soft_roce/guest.py", *["--full"] * full]
        error = None
        try:
            console = boot(made, exchange, f"""
                set -e
                cd {shlex.quote(str(ROOT))}
                tests/support/fakes/soft_roce/rails.sh
                export PYTHONPATH=$PWD:$PWD/tests/support:$PWD/tests/network
                export PYTHONDONTWRITEBYTECODE=1
                {shlex.join([*command, "/exchange/outcomes", *rest])}
            """, end - time.monotonic())  # fmt: skip
        except RuntimeError as caught:
            error, console = caught, str(caught)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        outcomes = [json.loads(line) for line in lines if line.endswith("\n")]
        for outcome in outcomes:
            shown = "" if outcome["passed"] else f"\n{console}"
            found[outcome["name"]] = {**outcome, "text": outcome["text"] + shown}
        if error is None:
            continue
        case = next((name for name in rest if name not in found), rest[-1])
        if isinstance(error, FrozenError):
            freezes[case] += 1
            if freezes[case] < 2:
                warnings.warn(f"started again for {case}: {error}", stacklevel=1)
                continue
        if not path.exists() or time.monotonic() > end:
            raise error
        found[case] = {"name": case, "passed": False, "seconds": 0.0, "text": console}
    return found
