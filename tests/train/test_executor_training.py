"""The executor in Megatron's own training program: everything an iteration has besides its ops.

Every case is trained twice, stock and ours; log lines and everything saved are compared.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from patience import decided
from trainings import (
    DROPOUT,
    ENDS,
    HALF,
    OVERFLOWS,
    SCALED,
    USUAL,
    digests,
    needs_training,
    stock,
    train,
    trained,
)

pytestmark = [needs_training, pytest.mark.timeout(1200)]

ON = ("--adaptra", "--adaptra-engine", "executor")
H1 = (*ON, "--adaptra-policy", "zb-h1", "--adaptra-recompute")
# With ends of iterations that wait for nobody.
H2 = (*ENDS, "--adaptra-engine", "executor", "--adaptra-policy", "zb-h2")
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1", "--num-layers", "8")
EXPERTS = (
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "aux_loss",
    "--moe-aux-loss-coeff", "1e-2", "--moe-token-dispatcher-type", "alltoall",
    "--disable-bias-linear",
)  # fmt: skip
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer")
CASES = {  # flags of both trainings, and of ours
    "overflows of some stages and their loss scale": (
        (*USUAL, *SCALED, *OVERFLOWS, "--clip-grad", "2"), H2,
    ),
    "tensor parallel, a batch size that grows": (
        (*HALF, "--tensor-model-parallel-size", "2", *DROPOUT, "--save-interval", "6",
         "--rampup-batch-size", "4", "4", "40"), H1,
    ),
    "chunks of experts, distributed optimizer": ((*HALF, *CHUNKS, *EXPERTS, *OVERLAP), ON),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_stock(name: str, tmp_path: Path) -> None:
    flags, asked = CASES[name]
    ours = trained(tmp_path, 4, *flags, *asked)
    assert ours.compared() == stock(4, *flags).compared()
    text = ours.done.text
    assert len(ours.done.printed) >= 8, "overflown iterations print no loss"
    assert "stock schedule: " not in re.sub("stock schedule: evaluation", "", text)
    for words in ("native engine", "run again"):
        assert words not in text


def interrupted(out: Path, *flags: str) -> tuple[list[object], list[list[int]], list[list[int]]]:
    """What a training in two parts has printed and saved, and the plans of either part."""
    places = ("--save", str(out / "saved"), "--load", str(out / "saved"))
    both = (*DROPOUT, *flags, *places, "--save-interval", "16")
    first = train(out, 4, *both, "--exit-interval", "11", iterations=16)
    second = train(out, 4, *both, iterations=16)
    what = [first.numbers, second.numbers, digests(out)]
    return what, first.plans, second.plans


def test_a_resumed_training_goes_on_as_stock(tmp_path: Path) -> None:
    slow = (*ON, "--adaptra-emulate-link", "2-3:40ms")
    ours, before, after = interrupted(tmp_path / "ours", *slow)
    assert ours == interrupted(tmp_path / "stock")[0]
    decided(f"a plan before the end: {before}", before[-1] != before[0])
    assert after[0] == before[-1]
