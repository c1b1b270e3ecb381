"""Trainings by Megatron's own program, on the megatron.training of the installed wheel (0.17 or
newer; put another one's folder on PYTHONPATH to test that). The script is pretrain_gpt_small.py.

Ranks are forks of a zygote; `train_cold` is for the few trainings that start as a user's do. What
only runs stock Megatron is trained once, however many compare themselves with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import ENVIRONMENT, zygote

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from megatron_lm_process import DIGESTS, execute, why  # noqa: E402
from megatron_lm_rows import FLAGS, LINE  # noqa: E402

SCRIPT = Path(__file__).parent / "ranks" / "pretrain_gpt_small.py"
TRAINING = {
    **ENVIRONMENT,
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
ITERATIONS = 12
# So long that what a busy machine adds to the ops is short beside it.
SLOW = ("--adaptra", "--adaptra-emulate-link", "2-3:120ms")
ENDS = ("--adaptra", "--adaptra-small-collectives", "on")
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
EVALUATION = ("--eval-interval", "5", "--eval-iters", "2")
USUAL = (*DROPOUT, *EVALUATION, "--save-interval", "6")  # most cases: one stock run serves them
SCALED = (
    "--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "3", "--hysteresis", "1",
)  # fmt: skip
OVERFLOWS = ("--user-overflow", "0:5,1:7,3:10,2:11")
HALF = ("--pipeline-model-parallel-size", "2")
NUMBERS = re.compile(  # all but the time
    r"iteration +(\d+)/.*?consumed samples: +(\d+).*?learning rate: (\S+).*?lm loss: (\S+).*?"
    r"loss scale: (\S+).*?(?:grad norm: (\S+).*?)?skipped iterations: +(\d+)"
)


def _has_training() -> bool:
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec("megatron")
        return any(
            (Path(folder) / "training" / "training.py").is_file()
            for folder in (spec.submodule_search_locations or () if spec is not None else ())
        )
    return False


HAS_TRAINING = _has_training()
NO_TRAINING = "the installed megatron-core has no megatron.training: wheels of 0.17 or newer have"
needs_training = pytest.mark.skipif(not HAS_TRAINING, reason=NO_TRAINING)


@dataclass(frozen=True)
class Done:
    """One training's end: exit status, everything printed, and Megatron's log lines."""

    status: int | str
    text: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if LINE.search(line)]

    @property
    def error(self) -> str:
        return why(self.text)

    @property
    def printed(self) -> list[tuple[str, str]]:
        """Loss and gradient norm of every iteration, as printed."""
        return [(match[3], match[4]) for match in map(LINE.search, self.lines) if match]

    @property
    def numbers(self) -> list[tuple[str, ...]]:
        """All that a log line says, but the time."""
        return NUMBERS.findall(self.text)

    @property
    def evaluated(self) -> list[str]:
        return re.findall(r"validation loss at (iteration \d+.*?PPL: \S+)", self.text)

    @property
    def plans(self) -> list[list[int]]:
        found = re.findall(r" adaptra: warmup ([\d,]+) \|", "\n".join(self.lines))
        return [[int(depth) for depth in plan.split(",")] for plan in found]

    def milliseconds(self) -> float:
        """The median of the last half."""
        times = [float(match[2]) for match in map(LINE.search, self.lines) if match]
        return statistics.median(times[len(times) // 2 :])


def words_of(folder: Path, ranks: int, *flags: str, iterations: int) -> list[str]:
    """The script and its flags: a stage per rank, unless a flag says otherwise."""
    return [
        str(SCRIPT), *FLAGS, "--vocab-size", "255", "--num-layers", str(max(ranks, 2)),
        "--pipeline-model-parallel-size", str(ranks), "--global-batch-size", "8", "--train-iters",
        str(iterations), "--user-flag", str(folder), *flags,
    ]  # fmt: skip


def train(folder: Path, ranks: int, *flags: str, iterations: int = ITERATIONS) -> Done:
    """A training that has to succeed, with the plugin if a flag asks for it."""
    words = words_of(folder, ranks, *flags, iterations=iterations)
    ours = "--adaptra" in flags
    ended = zygote(ours).run(folder, words, ranks=ranks, ends=ours)
    assert ended.status == 0, ended.text[-4000:]
    return Done(0, ended.text)


def train_cold(folder: Path, ranks: int, *flags: str, iterations: int = ITERATIONS) -> Done:
    """A training, started as a user does: by torchrun and our launcher.

    It has to succeed. Its processes are known by `folder`. Every rank prints to a file of its own;
    the text is these, rank after rank.
    """
    logs = folder / f"logs{len(list(folder.glob('logs*')))}"
    logs.mkdir(parents=True)
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects", "3",
        "--log-dir", str(logs), "--nproc-per-node", str(ranks), "-m", "megatron_adaptra.run",
        *words_of(folder, ranks, *flags, iterations=iterations),
    ]  # fmt: skip
    environment = {**TRAINING, "ADAPTRA_TEST_MODULES": "1"}
    status = execute(words, logs / "torchrun", folder, 500, environment)
    files = [logs / "torchrun", *sorted(logs.glob("*/attempt_0/*/*.log"))]
    text = "\n".join(path.read_text(errors="replace") for path in files)
    assert status == 0, text[-4000:]
    return Done(status, text)


def digests(folder: Path) -> dict[str, str]:
    """Of every checkpoint file in `folder`/saved: SHA-256 of its tensors and numbers."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    words = [DIGESTS, str(Path(spec.origin).parents[2]), str(folder / "saved")]
    done = zygote(False).run(folder / "digests", words, ends=False)
    assert done.status == 0, done.text[-3000:]
    (found,) = json.loads(done.text.strip().splitlines()[-1])
    assert found
    return found


def close(ours: Done, theirs: Done, times: float = 1.0) -> None:
    """All that is printed is the same, but for the order of sums.

    `times`: how much more than in fp32 that may change.
    """
    assert ours.numbers
    for mine, other in zip(ours.numbers, theirs.numbers, strict=True):
        for place, (a, b) in enumerate(zip(mine, other, strict=True)):
            within = {3: 1e-5, 5: 2e-3}.get(place)  # the loss; the norm, of which 4 digits are seen
            if a != b:  # of an overflow no norm is printed
                assert within, mine
                assert float(a) == pytest.approx(float(b), rel=times * within), mine
    rows = [re.findall(r"[\d.]+E[+-]\d+", " ".join(one.evaluated)) for one in (ours, theirs)]
    balanced = [[float(number) for number in auxiliary(one)] for one in (ours, theirs)]
    assert balanced[0] == pytest.approx(balanced[1], rel=times * 1e-4)
    evaluated = [[float(number) for number in row] for row in rows]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=times * 1e-4)


@dataclass(frozen=True)
class Result:
    """A training, and digests of all that it has saved (none without --save-interval)."""

    done: Done
    digests: dict[str, str]

    def compared(self) -> list[object]:
        """What has to be the same in two trainings."""
        return [self.done.numbers, self.done.evaluated, auxiliary(self.done), self.digests]


def auxiliary(done: Done) -> list[str]:
    return re.findall(r"load_balancing_loss: (\S+)", done.text)


def trained(folder: Path, ranks: int, *flags: str, iterations: int = ITERATIONS) -> Result:
    """A training whose checkpoints, if it saves any, are digested and removed."""
    saves = "--save-interval" in flags
    save = ("--save", str(folder / "saved")) if saves else ()
    done = train(folder, ranks, *flags, *save, iterations=iterations)
    found = digests(folder) if saves else {}
    shutil.rmtree(folder / "saved", ignore_errors=True)
    return Result(done, found)


@functools.cache
def stock(ranks: int, *flags: str, iterations: int = ITERATIONS) -> Result:
    """Stock Megatron, trained once for all that have the same flags."""
    assert not any(flag.startswith("--adaptra") for flag in flags)
    with tempfile.TemporaryDirectory() as folder:
        return trained(Path(folder), ranks, *flags, iterations=iterations)
