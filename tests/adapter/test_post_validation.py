"""Steps before their verdict, in Megatron's own training program: equal to stock to the last bit.

Every case is trained three times, once without post-validation; log lines and everything saved are
compared. `--adaptra-tail on`, for on one machine the exchange is no faster than the backend.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_pretrain
from test_pretrain import ROOT, TRAINING, Done, train

sys.path.insert(0, str(ROOT / "scripts"))

from megatron_lm_process import DIGESTS

pytestmark = test_pretrain.pytestmark

TAIL = ("--adaptra", "--adaptra-tail", "on")
ON = (*TAIL, "--adaptra-post-validate")
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
SCALED = (
    "--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "6", "--hysteresis", "1",
)  # fmt: skip
OVERFLOWS = ("--user-overflow", "0:8,1:11,3:14,2:15")
NUMBERS = re.compile(  # all but the time; other ranks may print into the rest of the line
    r"iteration +(\d+)/.*?consumed samples: +(\d+).*?learning rate: (\S+).*?lm loss: (\S+).*?"
    r"loss scale: (\S+).*?(?:grad norm: (\S+).*?)?skipped iterations: +(\d+)"
)
HALF = ("--pipeline-model-parallel-size", "2")


def saved(folder: Path, done: Done) -> list[object]:
    """What a training has printed, and digests of all it has saved."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    words = [sys.executable, DIGESTS, str(Path(spec.origin).parents[2]), str(folder / "saved")]
    told = subprocess.run(words, capture_output=True, text=True, check=True, env=TRAINING)
    digests = json.loads(told.stdout.strip().splitlines()[-1])
    assert digests[0]
    return [NUMBERS.findall(done.text), digests, done.evaluated]


def steps(done: Done) -> tuple[int, int]:
    """Before their verdict, and undone."""
    found = re.search(r"post-validation: (\d+) steps before their verdict, (\d+) undone", done.text)
    assert found, done.text[-3000:]
    return int(found[1]), int(found[2])


CASES: dict[str, tuple[tuple[str, ...], int]] = {  # flags, steps undone at least
    "clipping now and then, saved and evaluated in between": (
        (*DROPOUT, "--save-interval", "4", "--eval-interval", "6", "--eval-iters", "1"), 2,
    ),
    "overflows of some stages": (
        (*SCALED, *DROPOUT, *OVERFLOWS, "--clip-grad", "2", "--save-interval", "8"), 2,
    ),
    "the executor": (("--bf16", "--adaptra-engine", "executor", "--save-interval", "16"), 1),
    "a slow link, logged now and then": (
        ("--log-interval", "4", "--adaptra-emulate-link", "2-3:30ms@5..", "--save-interval", "16"),
        1,
    ),
    "tensor parallel": ((*HALF, "--tensor-model-parallel-size", "2", "--save-interval", "16"), 1),
    "data parallel": ((*HALF, "--save-interval", "16"), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_checkpoints_are_those_of_stock(name: str, tmp_path: Path) -> None:
    flags, least = CASES[name]
    ours = [f for f in range(len(flags)) if flags[f].startswith("--adaptra")]
    without = [f for i, f in enumerate(flags) if not {i, i - 1} & set(ours)]
    results = {}
    for arm, more in (("stock", without), ("tail", [*flags, *TAIL]), ("ours", [*flags, *ON])):
        out = tmp_path / arm
        done = train(out, 4, *more, "--save", str(out / "saved"), iterations=16)
        results[arm] = saved(out, done)
    assert results["tail"] == results["stock"]
    assert results["ours"] == results["stock"]
    trusted, undone = steps(done)
    assert trusted >= undone >= least


def test_a_training_goes_on_from_a_checkpoint_of_ours(tmp_path: Path) -> None:
    """Saved right after a step that was taken on trust; stock does the same, for a resumed Megatron
    prints one loss differently."""
    printed = {}
    for arm, more in (("stock", ()), ("ours", ON)):
        out = tmp_path / arm
        flags = (
            *more,
            "--clip-grad",
            "2",
            "--save",
            str(out / "saved"),
            "--load",
            str(out / "saved"),
        )
        first = train(out, 4, *flags, "--save-interval", "8", "--exit-interval", "8", iterations=12)
        second = train(out, 4, *flags, "--save-interval", "12", iterations=12)
        printed[arm] = first.printed + second.printed
    assert len(printed["stock"]) == 12
    assert printed["ours"] == printed["stock"]
    assert steps(first)[0] > 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--log-num-zeros-in-grad",), "--log-num-zeros-in-grad: True is not allowed; leave it"),
        (("--adaptra-tail", "off"), "post_validate: True is not allowed; a tail that is not off"),
    ],
)
def test_what_cannot_be_undone_is_refused(
    flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    command = test_pretrain.command(tmp_path, 2, "--adaptra", "--adaptra-post-validate", *flags)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=TRAINING, check=False
    )
    assert done.returncode
    assert words in done.stdout + done.stderr
