"""Losses of a last stage that has run no microbatch, because others have run all of its own.

Megatron's training program reads the names of losses from the first microbatch of each last stage,
and adds numerators and denominators up over the replicas.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_adaptra.transport.connect import gather


class IdleLosses:
    """An IdleLosses fills in one last-stage worker's losses; `group`: its peers in all replicas."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._pairs: Any = None  # what does for good, if every value is a pair

    def filled(self, losses: list[Any]) -> list[Any]:
        """Return the `losses` of an iteration, by microbatch, or neutral ones where there are none.

        A collective of the peers. A worker without losses gets those of one microbatch: zeros for a
        pair of numerator and denominator; for any other value, which Megatron does not add up over
        replicas, the first peer's own.
        """
        if self._pairs is None:
            given = gather(losses[0] if losses else None, self._group)
            one = next((one for one in given if one is not None), None)
            if one is None:
                return losses
            if all(_pair(value) for value in one.values()):
                self._pairs = {name: torch.zeros_like(value) for name, value in one.items()}
        else:
            one = self._pairs
        neutral = {n: torch.zeros_like(v) if _pair(v) else v for n, v in one.items()}
        return losses or [neutral]


def _pair(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 2
