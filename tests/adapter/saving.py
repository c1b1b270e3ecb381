"""Flags of trainings, and what a training has saved: for tests of Megatron's own program."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from test_pretrain import ROOT, TRAINING, Done

sys.path.insert(0, str(ROOT / "scripts"))

from megatron_lm_process import DIGESTS

ENDS = ("--adaptra", "--adaptra-small-collectives", "on")
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
