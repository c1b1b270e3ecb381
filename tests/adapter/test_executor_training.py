"""The executor in Megatron's own training program: everything an iteration has besides its ops.

Every case is trained twice, stock and ours; log lines and everything saved are compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from trainings import (
    DROPOUT,
    HALF,
    ITERATIONS,
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
H2 = (*ON, "--adaptra-policy", "zb-h2")
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1", "--num-layers", "8")
EXPERTS = (
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "aux_loss",
    "--moe-aux-loss-coeff", "1e-2", "--moe-token-dispatcher-type", "alltoall",
    "--disable-bias-linear",
)  # fmt: skip
SAVE = ("--save-interval", "8")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer")


@dataclass(frozen=True)
class Case:
    """Flags of both trainings, and of ours."""

    flags: tuple[str, ...]
    ours: tuple[str, ...]


# What USUAL is combined with saves checkpoints, which are compared, too.
CASES = {
    "memory in bytes": Case(
        USUAL, (*ON, "--adaptra-recompute", "--adaptra-activation-budget", "740kB")
    ),
    "overflows of some stages and their loss scale": Case(
        (*USUAL, *SCALED, *OVERFLOWS, "--clip-grad", "2"), H2
    ),
    "a batch size that grows": Case(("--rampup-batch-size", "4", "4", "80", *SAVE), H1),
    "experts and their auxiliary loss": Case((*EXPERTS, *USUAL), H1),
    "chunks of experts": Case((*CHUNKS, *EXPERTS, *SAVE), ON),
    "tensor parallel": Case((*HALF, "--tensor-model-parallel-size", "2", *USUAL), H1),
    "distributed optimizer and chunks": Case((*HALF, *CHUNKS, *OVERLAP), ON),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_stock(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours = trained(tmp_path, 4, *case.flags, *case.ours)
    assert ours.compared() == stock(4, *case.flags).compared()
    text = ours.done.text
    assert len(ours.done.printed) >= 12, "overflown iterations print no loss"
    assert "stock schedule: " not in re.sub("stock schedule: evaluation", "", text)
    assert "native engine" not in text


def interrupted(out: Path, *flags: str) -> tuple[list[object], list[list[int]], list[list[int]]]:
    """What a training in two parts has printed and saved, and the plans of either part."""
    both = (*DROPOUT, *flags, "--save", str(out / "saved"), "--load", str(out / "saved"))
    first = train(out, 4, *both, "--save-interval", str(ITERATIONS), "--exit-interval", "11")
    second = train(out, 4, *both, "--save-interval", str(ITERATIONS))
    what = [first.numbers, second.numbers, digests(out)]
    return what, first.plans, second.plans


@pytest.fixture(scope="module")
def stock_interrupted(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return interrupted(tmp_path_factory.mktemp("stock"))[0]


@pytest.mark.parametrize("more", [H1, (*ON, "--adaptra-emulate-link", "2-3:40ms")])
def test_a_resumed_training_goes_on_as_stock(
    more: tuple[str, ...], stock_interrupted: list[object], tmp_path: Path
) -> None:
    ours, before, after = interrupted(tmp_path, *more)
    assert ours == stock_interrupted
    assert after[0] == before[-1]
