"""Chooses all-reduces in a process of its own beside a training.

`python base/package.py megatron_adaptra.plan.reductions.choice_server` takes requests such as
`{"figures": .., "in_force": .., "min_gain": 0.05}`, and answers as Chosen.to_json has it.
"""

from __future__ import annotations

from typing import Any

from megatron_adaptra.plan.planning_server import serve
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.selector import Chosen, choose_all_reduce
from megatron_adaptra.plan.reductions.shard_selector import choose_shards


def choose(figures: Figures, in_force: Choice, min_gain: float) -> Chosen:
    """Choose the reduction to run from now on, of whole buffers or of shards, as `in_force` is.

    Args:
        figures, in_force, min_gain: see `choose_all_reduce` and `choose_shards`.

    Raises:
        BadInput: as these.
    """
    return (choose_shards if in_force.sharded else choose_all_reduce)(figures, in_force, min_gain)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the choice for a `request`, as an object for json.dump."""
    figures, in_force = Figures.from_json(request["figures"]), Choice.from_json(request["in_force"])
    return choose(figures, in_force, request["min_gain"]).to_json()


if __name__ == "__main__":
    serve(answer)
