"""Ranks without their cold start: a process that has imported Megatron forks those of a training.

Importing torch and Megatron takes a rank longer than most trainings of these tests. A zygote does
it once, in the order in which the launcher does, and each rank is a fork of it: a process of its
own, with its own interpreter's end, random states, environment, and file for what it prints. It
has one thread, which `_serve` asserts, for a fork takes only the thread that calls it along.

    with Zygote(plugin=True) as zygote:
        done = zygote.run(folder, [script, *flags], ranks=4)
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import gc
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_adaptra.base.processes import die_with_parent

START = 300.0  # seconds that the imports may take on a busy machine
GRACE = 20.0  # seconds that the other ranks get when one has failed: as torchrun, SIGTERM first
# What a training imports, sooner or later; a release need not have all of them.
MODULES = (
    "numpy", "torch", "torch.distributed", "torch._dynamo", "torch.profiler._cupti_monitor",
    "torch.utils.serialization", "torch.utils.tensorboard", "megatron.core",
    "megatron.core.datasets.gpt_dataset", "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing", "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.mimo",
    "megatron.core.optimizer", "megatron.core.rerun_state_machine",
    "megatron.core.tokenizers.text", "megatron.core.transformer.moe.moe_utils",
    "megatron.training", "megatron.training.arguments", "megatron.training.checkpointing",
    "megatron.training.training",
)  # fmt: skip
OURS = (
    "megatron_adaptra.adapter.entry.activate", "megatron_adaptra.adapter.pipeline.session",
    "megatron_adaptra.adapter.baseline.gpt", "megatron_adaptra.demo.worker",
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A training's end: by rank, its exit status (-9: killed) and everything it has printed."""

    statuses: tuple[int, ...]
    texts: tuple[str, ...]

    @property
    def status(self) -> int:
        return next((status for status in self.statuses if status), 0)

    @property
    def text(self) -> str:
        """Rank after rank, so that no line holds words of two."""
        return "\n".join(self.texts)


class Zygote:
    """Forks ranks of trainings, one training at a time. `plugin`: `register()` has been called.

    `environment`: instead of this process's, as where there are GPUs. `megatron`: False for ranks
    that need torch alone, which is imported in a fifth of the time.
    """

    def __init__(
        self, plugin: bool = False, environment: Mapping[str, str] | None = None,
        megatron: bool = True,
    ) -> None:  # fmt: skip
        self._kind = "plugin" if plugin else "stock" if megatron else "torch"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(
        self,
        folder: Path,
        words: list[str],
        *,
        ranks: int = 1,
        timeout: float = 600.0,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ends: bool = True,
    ) -> Done:
        """Run `words`, a script with its arguments, on every rank; what they print goes to files
        in `folder`. Raises TimeoutError, and ends all, if ranks have not ended by then.

        `ends`: False where the end of its interpreter proves nothing, as that of stock Megatron: it
        frees all that the zygote has imported, which takes a third of a second of each rank.
        """
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*-rank0.log")))
        logs = [str(folder / f"{number}-rank{rank}.log") for rank in range(ranks)]
        job = {
            "words": words, "logs": logs, "timeout": timeout, "cwd": str(cwd or folder),
            "environment": dict(environment or {}), "folder": str(folder), "ends": ends,
        }  # fmt: skip
        try:
            answer = self._ask(job, timeout + START)
        except BaseException:
            self.end()
            raise
        texts = tuple(Path(log).read_text(errors="replace") for log in logs)
        if answer["late"]:
            late = ", ".join(f"rank {rank}: {texts[rank][-1500:]}" for rank in answer["late"])
            raise TimeoutError(f"no end after {timeout:g} s of {late}")
        return Done(tuple(answer["statuses"]), texts)

    def _ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._control is None:
            self._start()
        assert self._control is not None
        self._control.settimeout(seconds)
        self._control.sendall(json.dumps(job).encode())
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._control is not None
        answer = self._control.recv(1 << 20)
        if not answer:
            raise RuntimeError("the zygote has ended; its last words are above")
        found: dict[str, Any] = json.loads(answer)
        return found

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), self._kind],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], preexec_fn=die_with_parent,
            env={**(self._environment or os.environ), "OMP_NUM_THREADS": "1",
                 "MKL_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                 "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        theirs.close()
        self._control.settimeout(START)
        self._answer()

    def end(self) -> None:
        """Its ranks die with it."""
        if self._process is not None:
            assert self._control is not None
            self._process.kill()
            self._process.wait()
            self._control.close()
            self._process = self._control = None


# From here on: inside the zygote.


def _serve(control: socket.socket, kind: str) -> Callable[[], int]:
    """Fork the ranks of one job after the other; returns, in each rank, what is to be run."""
    if kind == "plugin":
        sys.argv = [__file__, "--distributed-backend", "gloo"]  # register() looks for it
        from megatron_adaptra.adapter.entry.plugin import register

        register()
    elif kind == "stock":
        import torch

        if not torch.cuda.is_available():
            from megatron_adaptra.adapter.baseline import cpu

            cpu.install()
    if kind == "torch":
        import torch._dynamo  # else each rank that makes a DistributedDataParallel imports it
    else:
        _import()
    import one_gloo_device

    one_gloo_device.install()
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"up": os.getpid()}).encode())
    while message := control.recv(1 << 20):
        job = json.loads(message)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a zygote must have one thread; it has {len(threads)}"
        rank = _Training(job).run(control)
        if rank is not None:
            control.close()
            return rank
    os._exit(0)


def _import() -> None:
    import importlib

    from fakes import fused_kernel

    fused_kernel.install()
    for name in (*MODULES, *OURS):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _remember_sources()


def _remember_sources() -> None:
    """Of classes: Megatron takes the help of its flags from there, in every rank."""
    read = inspect.getsource
    of_class = functools.cache(read)
    inspect.getsource = lambda what: of_class(what) if isinstance(what, type) else read(what)
    with contextlib.suppress(ImportError):
        from megatron.training.arguments import add_megatron_arguments

        add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


class _Training:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.logs: list[str] = job["logs"]
        self.statuses: dict[int, int] = {}
        self.living: dict[int, tuple[int, int]] = {}  # descriptor -> rank, process

    def run(self, control: socket.socket) -> Callable[[], int] | None:
        """None in the zygote, which has answered; in a rank what it has to run."""
        store, port = _store()
        zygote = os.getpid()
        for rank in range(len(self.logs)):
            pid = os.fork()
            if pid == 0:
                for fd in self.living:
                    os.close(fd)
                _become(self.job, rank, port, zygote)
                return lambda: _run(self.job["words"], self.job["ends"])
            self.living[os.pidfd_open(pid)] = rank, pid
        late = self._wait()
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
        statuses = [self.statuses[rank] for rank in range(len(self.logs))]
        control.send(json.dumps({"statuses": statuses, "late": late}).encode())
        return None

    def _wait(self) -> list[int]:
        """Until all ranks have ended; those that had to be killed for it."""
        end, failed = time.monotonic() + self.job["timeout"], False
        while self.living:
            self._reap(max(0.0, end - time.monotonic()))
            if any(self.statuses.values()) and not failed:
                failed = True
                self._signal(signal.SIGTERM)
                end = min(end, time.monotonic() + GRACE)
            if self.living and time.monotonic() >= end:
                late = [] if failed else sorted(rank for rank, _ in self.living.values())
                self._signal(signal.SIGKILL)
                while self.living:
                    self._reap(GRACE)
                return late
        return []

    def _reap(self, seconds: float) -> None:
        ready, _, _ = select.select(list(self.living), [], [], seconds)
        for fd in ready:
            rank, pid = self.living.pop(fd)
            os.close(fd)
            self.statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _signal(self, signum: int) -> None:
        for _, pid in self.living.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def _store() -> tuple[int, int]:
    """The process and the port of a TCPStore for one training, as torchrun's agent keeps one.

    The port is the kernel's choice, and taken from the start: no other training can get it. The
    store has threads, and so a process.
    """
    read, write = os.pipe()
    zygote, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            _die_with(zygote)
            import torch.distributed as dist

            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            os.write(write, str(store.port).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    port = int(os.read(read, 16))
    os.close(read)
    return pid, port


def _die_with(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _become(job: dict[str, Any], rank: int, port: int, zygote: int) -> None:
    """Make this fork a rank as torchrun starts one."""
    _die_with(zygote)
    log = os.open(job["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # What the zygote has imported stays set aside. Given back, as the plugin does with what it sets
    # aside, it would be looked through at each rank's end, which takes longer than most trainings.
    gc.freeze = gc.unfreeze = lambda: None
    ranks = str(len(job["logs"]))
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
        GROUP_RANK="0", GROUP_WORLD_SIZE="1", ROLE_RANK=str(rank), ROLE_WORLD_SIZE=ranks,
        ROLE_NAME="default", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0", TORCHELASTIC_RUN_ID="zygote",
    )  # fmt: skip
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])


def _run(words: list[str], ends: bool) -> int:
    import runpy

    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)  # as Python does for a script
    runpy.run_path(words[0], run_name="__main__")
    if not ends:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parent))
    # A rank returns from here, and so ends as any Python program does.
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])())
