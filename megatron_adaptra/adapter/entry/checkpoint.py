"""The plan in Megatron's checkpoints: a small file of the leader's beside the model's.

A restarted job goes on with the plan that was in force, and knows which delays it was made for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_adaptra.adapt.leader import planner_of
from megatron_adaptra.adapter.pipeline.resumed import FORMAT, read_state
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.agree.bundle import SCHEDULE
from megatron_adaptra.base.files import replacing
from megatron_adaptra.base.log import log_line


def save(session: Session, iteration: int) -> None:
    """After Megatron has saved `iteration`, in a folder of its own that this host has.

    What fails here does not end the training. Megatron makes no such folder for what it saves in
    object storage, or locally for each rank. Nothing is saved while acting is off: links that are
    slow now are planned for when it is on again.
    """
    from megatron.training import get_args

    state = _state(session.run)
    folder = get_args().save
    if state is None or not folder or not session.context.acts():
        return
    path = _path(folder, iteration)
    if not path.parent.is_dir():
        session.context.say(f"the plan is not saved with checkpoints: no folder {path.parent} here")
        return
    try:
        with replacing(path) as partial:
            partial.write_text(json.dumps({"format": FORMAT, **state}, indent=1))
    except OSError as error:
        log_line(f"the plan was not saved with the checkpoint of iteration {iteration}: {error}")


def resume(session: Session) -> None:
    """After Megatron has loaded a checkpoint, or found none."""
    from megatron.training import get_args

    args = get_args()
    if not args.load or not args.iteration or session.config.observes:
        return
    session.resumed = read_state(_path(args.load, args.iteration))


def _path(folder: str, iteration: int) -> Path:
    """Every replica has a plan of its own."""
    from megatron.training.checkpointing import get_checkpoint_name

    base = get_checkpoint_name(folder, iteration, return_base_dir=True)
    return Path(base) / f"adaptra-replica{mpu.get_data_parallel_rank()}.json"


def _state(run: Run | None) -> dict[str, Any] | None:
    """Return the schedule and delays of a `run`, on the rank that leads; None on others."""
    if run is None or run.abandoned or (remedy := planner_of(run.controller)) is None:
        return None
    schedule = run.controller.ballot.lasting[SCHEDULE]
    return {"schedule": schedule.text(), "delays": remedy.state()}
