"""Children of a rank: a signal for them ends them, and the rank goes on."""

from __future__ import annotations

import signal
import subprocess
import sys

from patience import PATIENCE

RANK = """
import contextlib, multiprocessing, os, signal, stat, subprocess, threading, time
from megatron_adaptra.execute.watchdog import ExitOnSignal

context = multiprocessing.get_context("fork")
seen = []
signal.signal(signal.SIGCHLD, lambda signum, _: seen.append(signum))
undo = ExitOnSignal(signal.SIGTERM, lambda: "words").undo

def child(body):
    pid = os.fork()
    if pid == 0:
        body()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def kill_itself():
    os.kill(os.getpid(), signal.SIGTERM)

def process():
    one = context.Process(target=time.sleep, args=(600,))
    one.start()
    one.terminate()  # often before it has run a line of Python
    one.join()
    return one.exitcode

def pool():
    with context.Pool(2) as pool:  # its end is SIGTERM
        return sum(pool.map(abs, [-1, -2]))

def thread():
    found = []
    one = threading.Thread(target=lambda: found.append(child(kill_itself)))
    one.start()
    one.join()
    return found[0]

def grandchild():
    return child(lambda: os._exit(-child(kill_itself)))

def command(**options):
    sleeper = subprocess.Popen(["sleep", "600"], **options)
    sleeper.terminate()
    return sleeper.wait()

def handler():
    def body():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))  # the child's own
        kill_itself()
        time.sleep(600)
    return child(body)

def clean():
    def body():
        fine = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
        for fd in range(64):
            with contextlib.suppress(OSError):
                fine &= not stat.S_ISSOCK(os.fstat(fd).st_mode)
        os._exit(fine)
    return child(body)

{body}
print("alive", len(seen) > 0, flush=True)
"""
CASES = {
    "a process, ended as soon as it is there": ("[process() for _ in range(100)]", [-15] * 100),
    "a pool": ("pool()", 3),
    "a fork": ("child(kill_itself)", -15),
    "a fork of another thread": ("thread()", -15),
    "a fork's fork": ("grandchild()", 15),
    "a command": ("command()", -15),
    "a command with something to do first": ("command(preexec_fn=os.getpid)", -15),
    "a command of another session": ("command(start_new_session=True)", -15),
    "a child with a handler of its own": ("handler()", 3),
    "what a child has of ours": ("clean()", 1),
}


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", RANK.replace("{body}", body)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def test_a_signal_for_a_child_ends_the_child_alone() -> None:
    """One rank has all the children, one after another."""
    shown = "\n".join(f"print(({name!r}, {body}), flush=True)" for name, (body, _) in CASES.items())
    done = run(shown)
    assert (done.returncode, done.stderr) == (0, "")
    *found, last = done.stdout.splitlines()
    assert found == [repr((name, expected)) for name, (_, expected) in CASES.items()]
    assert last == "alive True"


def test_after_its_children_a_rank_still_logs_a_line_and_exits() -> None:
    done = run("pool(), process(), child(kill_itself)\nos.kill(os.getpid(), signal.SIGTERM)")
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == "adaptra: ended by signal 15: words\n"


def test_a_signal_still_ends_a_rank_whose_wake_up_descriptor_was_taken() -> None:
    """As asyncio takes it."""
    done = run("signal.set_wakeup_fd(-1)\nos.kill(os.getpid(), signal.SIGTERM)")
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.count("ended by signal 15") == 1


def test_given_back_it_leaves_no_thread_and_no_descriptor() -> None:
    done = run(
        "undo()\n"
        "read, write = os.pipe2(os.O_NONBLOCK)\n"
        "signal.set_wakeup_fd(write, warn_on_full_buffer=False)\n"
        "before = len(os.listdir('/proc/self/fd')), threading.active_count()\n"
        "for _ in range(10):\n"
        "    undo = ExitOnSignal(signal.SIGTERM, str).undo\n"
        "    sleeper = subprocess.Popen(['sleep', '600'], close_fds=False)\n"
        "    undo(); undo(); sleeper.kill(); sleeper.wait()\n"
        "assert before == (len(os.listdir('/proc/self/fd')), threading.active_count())\n"
        "assert signal.set_wakeup_fd(-1) == write"
    )
    assert (done.returncode, done.stderr) == (0, "")
