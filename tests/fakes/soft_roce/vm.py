"""A virtual machine with soft-RoCE devices, that sees this machine's files and changes none."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
_PREPARE = 900  # seconds, downloads among them


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


def boot(made: Path, exchange: Path, script: str, seconds: float) -> str:
    """Run `script` (bash) as root in the machine; what it has printed.

    `made`: of `prepared`. `exchange`: a folder, in the machine /exchange, where both may write.
    Raises RuntimeError if the script fails, or the machine does.
    """
    (exchange / "guest.sh").write_text(script)
    (exchange / "status").unlink(missing_ok=True)
    console = exchange / "console.txt"
    # qemu dies with this process, however that ends. It emulates the processor: where /dev/kvm can
    # be opened it need not work.
    command = [
        "setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64",
        "-machine", "q35", "-accel", "tcg,thread=multi",
        "-cpu", "max,-erms,-fsrm",  # without instructions whose emulation copies byte by byte
        "-smp", "2", "-m", "3G",
        "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none",
        "-kernel", str(made / "kernel"), "-initrd", str(made / "initrd"),
        "-append", "console=ttyS0 quiet mitigations=off nokaslr tsc=reliable no_timer_check "
        "panic=-1 oops=panic",
        "-serial", f"file:{console}",
        "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        "-virtfs", f"local,path={exchange},mount_tag=exchange,security_model=none,multidevs=remap",
        "-device", "virtio-rng-pci",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as machine:
        try:
            machine.wait(seconds)
            how = f"qemu ended with status {machine.returncode}"
        except subprocess.TimeoutExpired:
            how = f"it did not end within {seconds:g} s"
        finally:
            machine.kill()
    output = console.read_text(errors="replace") if console.exists() else ""
    status = exchange / "status"
    if not status.exists():
        raise RuntimeError(f"the virtual machine failed: {how}\n{output}")
    if (code := status.read_text().strip()) != "0":
        raise RuntimeError(f"in the virtual machine: status {code}\n{output}")
    return output
