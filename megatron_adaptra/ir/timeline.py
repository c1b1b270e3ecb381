"""When each op of a pipeline ran: one type for predicted and for measured iterations.

Pictures show it, and timelines of other things, as bars on rows (view/pipeline.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_adaptra.ir.op import Op
from megatron_adaptra.ir.schedule import peak_in_flight


class Span(NamedTuple):
    """One op ran on one worker.

    Args:
        stage: where; of several replicas, the number of the worker.
        op: one that computes, or the optimizer step, or a collective of that step.
        start, end: seconds from the iteration's start.
    """

    stage: int
    op: Op
    start: float
    end: float


class Message(NamedTuple):
    """The output of one op went from one stage to another.

    Args:
        source, target: stages; of several replicas, workers.
        op: the one that made it, or its send.
        sent: when it left the source; seconds from the iteration's start.
        arrived: when the target had it; seconds, too.
        posted: when the receive was posted; seconds, too, or None where that was not measured.
    """

    source: int
    target: int
    op: Op
    sent: float
    arrived: float
    posted: float | None = None


@dataclass(frozen=True)
class Timeline:
    """When each op of one iteration ran, predicted or measured.

    Args:
        spans: of all stages, in any order.
        messages: between stages, in any order; empty where they are not known.
        name: whose it is, for people: "adaptra measured".
        replicas: of which each worker has spans of its own, see `ir.routes`.
        depth: stages of a replica; 0 for as many as have spans.
    """

    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    name: str = ""
    replicas: int = 1
    depth: int = 0

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    @property
    def pipeline(self) -> float:
        """Seconds from the first start to the end of the last op that computes."""
        ends = [s.end for s in self.spans if s.op.kind.computes]
        return max(ends) - min(s.start for s in self.spans) if ends else 0.0

    @property
    def iteration(self) -> float:
        """Seconds as the first stage sees them: it starts the pipeline and is the last to end.

        Another stage's step may reach into the next iteration. With several replicas, from the
        first start of their first stages to the last end of these.
        """
        stages = self.stages
        own = [s for s in self.spans if s.stage % stages == 0]
        return max(s.end for s in own) - min(s.start for s in own) if own else 0.0

    @property
    def stages(self) -> int:
        """How many stages each replica has."""
        return self.depth or 1 + max((s.stage for s in self.spans), default=-1)

    @property
    def workers(self) -> int:
        """The number of workers in all replicas; the stages of a single one."""
        return self.stages * self.replicas

    def busy(self, worker: int) -> float:
        """Seconds of compute on `worker`; the optimizer step does not count."""
        return sum(s.end - s.start for s in self.spans if s.stage == worker and s.op.kind.computes)

    def peak_in_flight(self) -> tuple[float, ...]:
        """Per worker, the most activations held at once (units of design: one microbatch)."""
        peaks = []
        chunks = 1 + max((s.op.chunk for s in self.spans), default=0)
        # Of two ops that start together, one without duration is first.
        ordered = sorted(self.spans, key=lambda s: (s.start, s.end))
        for worker in range(self.workers):
            line = [s.op for s in ordered if s.stage == worker]
            peaks.append(peak_in_flight(line, chunks))
        return tuple(peaks)

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump: ops by their text forms, times in seconds."""
        several = {"replicas": self.replicas, "stages": self.stages} if self.replicas > 1 else {}
        return {
            "name": self.name,
            **several,
            "spans": [[s.stage, str(s.op), s.start, s.end] for s in self.spans],
            "messages": [[m.source, m.target, str(m.op), *m[3:]] for m in self.messages],
        }
