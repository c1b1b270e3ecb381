"""Routes of microbatches: the worker that runs each one at each stage, as a schedule has it.

A *worker* is one stage of one replica. Workers are numbered replica by replica, `replica * stages +
stage`, so that those of a single pipeline are its stages. Workers of one stage hold the same
parameters, so any of them can run a microbatch of any replica, its *home*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.op import Kind, Op

Place = tuple[int, int, int]  # stage, home, microbatch
Path = tuple[int, int]  # directed, between workers of adjacent stages


@dataclass(frozen=True)
class Routes:
    """The worker of every microbatch at every position of the model.

    Position `chunk * stages + stage` is one chunk of one stage (Megatron's loop placement).

    Args:
        stages: of each replica.
        chunks: model chunks per stage; 1 where there are several replicas.
        replicas: pipelines that hold the same parameters.
        moved: by stage, home and microbatch, the replica that runs it there, where that is not its
            home.
    """

    stages: int
    chunks: int = 1
    replicas: int = 1
    moved: Mapping[Place, int] = field(default_factory=dict)

    @cached_property
    def positions(self) -> int:
        """The number of positions in the model; each microbatch passes all of them."""
        return self.stages * self.chunks

    @property
    def workers(self) -> int:
        """The number of workers in all replicas."""
        return self.stages * self.replicas

    def worker(self, position: int, microbatch: int, home: int | None = None) -> int:
        """Return the worker that runs `microbatch` of `home` (None: the only one) at `position`."""
        stage = position % self.stages
        if home is None:
            return stage
        return self.moved.get((stage, home, microbatch), home) * self.stages + stage

    def cross_paths(self, microbatches: int) -> frozenset[Path]:
        """The paths between two replicas that an iteration of so many `microbatches` uses."""
        found: set[Path] = set()
        for stage in range(1, self.stages):
            for home in range(self.replicas):
                for microbatch in range(microbatches):
                    a, b = (self.worker(s, microbatch, home) for s in (stage - 1, stage))
                    if a // self.stages != b // self.stages:
                        found |= {(a, b), (b, a)}
        return frozenset(found)

    def name(self, worker: int) -> str:
        """`stage 2` of a single pipeline, `worker 1.2` of several: replica and stage."""
        if self.replicas == 1:
            return f"stage {worker}"
        return f"worker {worker_name(worker, self.stages)}"


def worker_name(worker: int, stages: int) -> str:
    """`1.2`: replica and stage of a `worker`, of replicas with so many `stages` each."""
    replica, stage = divmod(worker, stages)
    return f"{replica}.{stage}"


def parse_worker(text: str, stages: int) -> int:
    """The worker that `text` names, `1.2`, of replicas with so many `stages`. Raises BadInput."""
    replica, dot, stage = text.partition(".")
    if not (dot and replica.isdecimal() and stage.isdecimal() and int(stage) < stages):
        allowed = f"replica and stage, such as 1.2; stages are 0 to {stages - 1}"
        raise BadInput("worker", text, allowed)
    return int(replica) * stages + int(stage)


def routes_of(order: Sequence[Sequence[Op]], chunks: int = 1, replicas: int = 1) -> Routes:
    """The routes that a schedule's or a program's lines follow.

    Args:
        order: per worker, its ops.
        chunks: per stage.
        replicas: pipelines of equal length that the workers form.
    """
    stages = len(order) // replicas
    moved: dict[Place, int] = {}
    if replicas > 1:
        for worker, line in enumerate(order):
            replica, stage = divmod(worker, stages)
            for op in line:
                if op.kind is Kind.F and op.home is not None and op.home != replica:
                    moved[stage, op.home, op.microbatch] = replica
    return Routes(stages, chunks, replicas, moved)
