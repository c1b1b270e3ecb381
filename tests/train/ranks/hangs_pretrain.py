"""Run a training script that hangs once, until all other ranks have named it.

KIND:RANK:ITERATION TIMEOUT SCRIPT...: the rank hangs in a forward of that iteration, or in what it
sends then; after TIMEOUT seconds it goes on in any case.
"""

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

FAULT = sys.argv[1]
LOG = Path(os.readlink("/proc/self/fd/2"))  # 0-rank3.log


def hold(timeout: float, others: list[int]) -> None:
    """Block until all other ranks have named a hang."""
    began = time.monotonic()
    # A slow start, without progress either, is another phase.
    line = f"no progress in iteration {FAULT.split(':')[2]} "
    while not all(line in log_of(rank).read_text(errors="replace") for rank in others):
        if time.monotonic() - began > timeout:
            print("not named by all", flush=True)
            return
        time.sleep(0.05)
    print(f"all lines after {time.monotonic() - began:.1f} s", flush=True)


def log_of(rank: int) -> Path:
    return LOG.with_name(re.sub(r"rank\d+", f"rank{rank}", LOG.name))


def stop(timeout: float, others: list[int]) -> None:
    """Stop this process, which another one lets go on."""
    words = [
        sys.executable,
        __file__,
        FAULT,
        "stopped",
        str(os.getpid()),
        str(timeout),
        *map(str, others),
    ]
    subprocess.Popen(words)
    time.sleep(1)  # it is stopped meanwhile


def fill_disk(timeout: float, others: list[int]) -> None:
    """Write to a full disk again and again, as a user's code may."""
    done = threading.Thread(target=hold, args=(timeout, others), daemon=True)
    done.start()
    while done.is_alive():
        try:
            Path("/dev/full").write_text("a shard")
        except OSError:
            time.sleep(0.1)


class Held:
    """A message that its transport gets when the others have named the hang."""

    def __init__(self, send, timeout, others):
        self._sent = None
        self._thread = threading.Thread(target=self._run, args=(send, timeout, others), daemon=True)
        self._thread.start()

    def _run(self, send, timeout, others):
        hold(timeout, others)
        self._sent = send()

    def wait(self, timeout):
        self._thread.join()
        return self._sent.wait(timeout)

    def __getattr__(self, name):
        self._thread.join()
        return getattr(self._sent, name)


def main():
    import torch.distributed as dist
    import wrapt

    import megatron_adaptra

    _, _, timeout, *sys.argv = sys.argv
    kind, rank, iteration = FAULT.split(":")
    megatron_adaptra.register()
    from megatron.training import get_args

    left, seconds = [FAULT], float(timeout)
    others = [one for one in range(int(os.environ["WORLD_SIZE"])) if one != int(rank)]

    def due() -> bool:
        here = dist.is_initialized() and dist.get_rank() == int(rank)
        now = here and getattr(get_args(), "curr_iteration", -1) + 1 == int(iteration)
        return bool(now and left and left.pop())

    if kind in ("stop", "disk"):

        @wrapt.patch_function_wrapper("megatron.core.models.gpt", "GPTModel.forward")
        def forward(wrapped, _, args, kwargs):
            if due():
                {"stop": stop, "disk": fill_disk}[kind](seconds, others)
            return wrapped(*args, **kwargs)

    if kind == "loader":
        data = "megatron.core.datasets.gpt_dataset"

        @wrapt.patch_function_wrapper(data, "MockGPTDataset.__getitem__")
        def read_sample(wrapped, _, args, kwargs):
            if due():
                hold(seconds, others)
            return wrapped(*args, **kwargs)

    if kind == "all-reduce":
        native = dist.ProcessGroup.allreduce

        def network(group, *args, **kwargs):
            if group.size() > 1 and due():
                hold(seconds, others)
            return native(group, *args, **kwargs)

        dist.ProcessGroup.allreduce = network
    if kind == "message":

        @wrapt.patch_function_wrapper("megatron_adaptra.execute.mailbox", "Mailbox.send")
        def send(wrapped, mailbox, args, kwargs):
            if due():
                (made, _), transports = mailbox.neighbours.exchange(args[0]), mailbox._transports
                transport = transports[made.kind]

                class Drops:
                    def isend(self, tensor, *to):
                        copy = tensor.detach().clone()
                        transports[made.kind] = transport
                        return Held(lambda: transport.isend(copy, *to), seconds, others)

                transports[made.kind] = Drops()
            return wrapped(*args, **kwargs)

    runpy.run_path(sys.argv[0], run_name="__main__")
    assert dist.get_rank() != int(rank) or not left


if __name__ == "__main__":
    if sys.argv[2] == "stopped":
        os.kill(int(sys.argv[3]), signal.SIGSTOP)
        hold(float(sys.argv[4]), list(map(int, sys.argv[5:])))
        os.kill(int(sys.argv[3]), signal.SIGCONT)
    else:
        main()
