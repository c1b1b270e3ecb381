"""Runs a forward that validates its loss, and runs it again; prints what was validated."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

from typing import Any

from megatron.core import rerun_state_machine as reruns

from megatron_adaptra.adapter.pipeline.recompute import Replay


class Model(torch.nn.Module):
    """Counts its forwards, as a balance of experts does, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        loss = torch.nn.functional.dropout(x, 0.5).sum() * self.runs.item()
        reruns.get_rerun_state_machine().validate_result(loss, torch.isnan, "the loss")
        return loss


def main() -> None:
    reruns.initialize_rerun_state_machine()
    machine, seen = reruns.get_rerun_state_machine(), []

    def validate(result: Any, *_: Any, **__: Any) -> None:
        seen.append(result.item())

    machine.validate_result = validate
    model, x = Model(), torch.randn(64, requires_grad=True)
    replay = Replay()
    with replay.discard(model):
        first = model(x).item()
    model(x)  # random states and statistics go on
    with replay.recompute(model):
        again = model(x)
    again.backward()
    assert machine.validate_result is validate
    assert again.item() == first == seen[0]
    assert len(seen) == model.runs.item() == 2
    assert x.grad is not None
    print("REPLAYED")


main()
