"""The executor in Megatron's own training program: everything an iteration has besides its ops.

Every case is trained twice, stock and ours; log lines and everything saved are compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import test_pretrain
from saving import DROPOUT, HALF, OVERFLOWS, SCALED, saved
from test_pretrain import Done, train

pytestmark = test_pretrain.pytestmark

ON = ("--adaptra", "--adaptra-engine", "executor")
H1 = (*ON, "--adaptra-policy", "zb-h1", "--adaptra-recompute")
H2 = (*ON, "--adaptra-policy", "zb-h2")
CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1", "--num-layers", "8")
EXPERTS = (
    "--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "aux_loss",
    "--moe-aux-loss-coeff", "1e-2", "--moe-token-dispatcher-type", "alltoall",
    "--disable-bias-linear",
)  # fmt: skip
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer")
EVALUATION = ("--eval-interval", "5", "--eval-iters", "2")


@dataclass(frozen=True)
class Case:
    """Flags of both trainings, and of ours. `digests`: whether what is saved can be compared."""

    flags: tuple[str, ...]
    ours: tuple[str, ...]
    digests: bool = True


CASES = {
    "evaluations and checkpoints between halves": Case((*DROPOUT, *EVALUATION), H1),
    "a slow link in little memory": Case(
        DROPOUT,
        (*ON, "--adaptra-recompute", "--adaptra-activation-budget", "4",
         "--adaptra-emulate-link", "2-3:40ms"),
    ),
    "memory in bytes": Case(
        (), (*ON, "--adaptra-recompute", "--adaptra-activation-budget", "300KiB")
    ),
    "overflows of some stages and their loss scale": Case((*SCALED, *DROPOUT, *OVERFLOWS), H2),
    "a batch size that grows": Case(("--rampup-batch-size", "4", "4", "80"), H1),
    "experts and their auxiliary loss": Case((*EXPERTS, *DROPOUT), H1),
    "loss per token": Case(("--calculate-per-token-loss",), H1),
    "chunks, recomputed": Case(
        (*CHUNKS, *DROPOUT, *EVALUATION), (*ON, "--adaptra-recompute")
    ),
    "chunks of experts": Case((*CHUNKS, *EXPERTS), ON),
    "tensor parallel": Case((*HALF, "--tensor-model-parallel-size", "2", *DROPOUT), H1),
    "data parallel, buckets": Case((*HALF, "--overlap-grad-reduce", "--bf16"), H2),
    "distributed optimizer": Case((*HALF, *OVERLAP), H1, digests=False),
    "distributed optimizer and chunks": Case((*HALF, *CHUNKS, *OVERLAP), ON, digests=False),
}  # fmt: skip


def auxiliary(done: Done) -> list[str]:
    return re.findall(r"load_balancing_loss: (\S+)", done.text)


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_stock(name: str, tmp_path: Path) -> None:
    case, found = CASES[name], {}
    for arm, more in (("stock", ()), ("ours", case.ours)):
        out = tmp_path / arm
        saves = ("--save", str(out / "saved"), "--save-interval", "8") if case.digests else ()
        done = train(out, 4, *case.flags, *more, *saves, iterations=16)
        what = saved(out, done) if case.digests else [done.printed, done.evaluated]
        found[arm] = [*what, auxiliary(done)]
    assert found["ours"] == found["stock"]
    assert len(done.printed) >= 12, "overflown iterations print no loss"
    assert "stock schedule: " not in re.sub("stock schedule: evaluation", "", done.text)
    assert "native engine" not in done.text
    if name == "memory in bytes":
        assert "its memory is for" in done.text


@pytest.mark.parametrize("more", [H1, (*ON, "--adaptra-emulate-link", "2-3:40ms")])
def test_a_resumed_training_goes_on_as_stock(more: tuple[str, ...], tmp_path: Path) -> None:
    found = {}
    for arm, flags in (("stock", ()), ("ours", more)):
        out = tmp_path / arm
        folder = ("--save", str(out / "saved"), "--load", str(out / "saved"))
        folder += ("--save-interval", "16")
        all_flags = (*DROPOUT, *flags, *folder)
        first = train(out, 4, *all_flags, "--exit-interval", "11", iterations=16)
        second = train(out, 4, *all_flags, iterations=16)
        found[arm] = [first.printed, saved(out, second)]
    assert found["ours"] == found["stock"]
    assert second.plans[0] == first.plans[-1]
