"""What stands posted for an iteration that is not to be: every message of it has two ends."""

from __future__ import annotations

from collections import Counter

from megatron_adaptra.ir.deps import carried
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.posting import Link, receives_ahead, traffic_of
from megatron_adaptra.ir.program import Program, first_posts, unused_posts
from megatron_adaptra.ir.schedule import Schedule


def posted_ahead(schedule: Schedule) -> dict[Link, int]:
    """What `lower` posts by itself."""
    return receives_ahead(traffic_of(schedule), schedule.routes)


def assert_served(program: Program) -> Counter:
    """Every message that stands posted anywhere is sent once, and discarded once."""
    sent, discarded = Counter(), Counter()
    for worker in range(len(program.order)):
        unused = unused_posts(program, worker)
        assert unused.to_discard == first_posts(program, worker)
        assert all(op.kind in (Kind.SEND_F, Kind.SEND_B) for op in unused.to_send)
        sent.update(carried(op, worker, program.routes) for op in unused.to_send)
        discarded.update(carried(op, worker, program.routes) for op in unused.to_discard)
    assert sent == discarded
    assert all(count == 1 for count in sent.values())
    return sent
