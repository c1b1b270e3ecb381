"""Any job that a planner may be given, as a strategy of hypothesis."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from megatron_adaptra.ir.conditions import Conditions, LinkState

few = st.sampled_from([0.0, 1.0, 2.0, 3.0])  # zeros and ties, where orders differ and times do not
seconds = few | st.floats(1e-6, 9)  # 0 is in few; dispatch takes picoseconds for nothing
delays = st.sampled_from([0.0, 1.0, 6.0, 30.0]) | st.floats(1e-6, 40)
rarely = st.sampled_from([False, False, True])
limits = st.sampled_from([1.0, 1.05, 1.5, 2.0, 2.3, 3.0, math.inf]) | st.floats(1, 9)


@st.composite
def jobs(draw: st.DrawFn, stages: int = 4, most: int = 8, cores: bool = True) -> Conditions:
    """All levers, unequal directions, tight budgets, fewer microbatches than stages.

    `most`: microbatches times chunks, at most. `cores`: whether stages may have to share some.
    """
    p, chunks = draw(st.integers(1, stages)), draw(st.sampled_from([1, 1, 2, 3]))
    count = draw(st.integers(1, max(1, most // chunks)))

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return draw(values.map(lambda one: (one,) * p) | st.tuples(*[values] * p))

    pairs = {(i, (i + 1) % p) for i in range(p - (chunks == 1))}  # of several chunks, a ring
    ways = sorted({way for a, b in pairs if a != b for way in ((a, b), (b, a))})
    link = st.builds(LinkState, delays, st.just(math.inf) | st.floats(0.1, 10), st.just(0.0))
    return Conditions(
        count,
        each(seconds),
        each(seconds),
        each(seconds),
        draw(st.dictionaries(st.sampled_from(ways), link)) if ways else {},
        message_bytes=draw(st.sampled_from([0.0, 1.0])),
        activation_budget=each(limits),
        step_seconds=draw(st.sampled_from([0.0, 1.5])),
        cores=draw(st.none() | st.floats(0.5, 5)) if cores else None,
        chunks=chunks,
        split=draw(st.booleans()),
        recompute=draw(st.booleans()),
        backward=each(seconds) if draw(rarely) else (),
        recomputation=each(seconds) if draw(rarely) else (),
        ports=draw(st.dictionaries(st.integers(0, p - 1), st.floats(0.1, 10)))
        if draw(rarely)
        else {},
    )
