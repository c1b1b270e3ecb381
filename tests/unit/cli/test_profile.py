"""A profile as Conditions: every value in its place, in seconds."""

import math

from commands import JOB

from megatron_adaptra.cli.profile import conditions_of
from megatron_adaptra.ir.conditions import LinkState


def test_links_in_both_directions():
    more = {"return_delay_ms": 20, "link_jitter": [0, 0, 0.5], "link_bandwidth": [1e9, 2e9, 3e9]}
    conditions = conditions_of({**JOB, **more})
    assert conditions.links == {
        (0, 1): LinkState(0.0, 1e9),
        (1, 0): LinkState(0.02, 1e9),
        (1, 2): LinkState(0.0, 2e9),
        (2, 1): LinkState(0.02, 2e9),
        (2, 3): LinkState(0.06, 3e9, 0.03),
        (3, 2): LinkState(0.02, 3e9, 0.01),
    }


def test_ports_that_have_no_limit_are_none():
    rates = {"port_bandwidth": [math.inf, "20MB/s", 3e7, math.inf]}
    assert conditions_of({**JOB, **rates}).ports == {1: 2e7, 2: 3e7}
    assert conditions_of(JOB).ports == {}


def test_chunks_close_the_ring():
    ring = conditions_of({**JOB, "chunks": 2, "link_jitter": 0.5, "link_delay_ms": [0, 0, 0, 8]})
    assert ring.chunks == 2
    assert ring.link(3, 0) == ring.link(0, 3) == LinkState(0.008, math.inf, 0.004)
    open_ = conditions_of({**JOB, "chunks": 2, "link_bandwidth": [1e9] * 3})
    assert open_.link(3, 0) == LinkState()
    # With two stages, the way back is the link that is there already.
    two = {**JOB, "stages": 2, "chunks": 2, "backward_weight_ms": 6, "link_delay_ms": [5]}
    assert set(conditions_of(two).links) == {(0, 1), (1, 0)}


def test_the_rest():
    c = conditions_of(
        {
            **JOB,
            "optimizer_ms": 30,
            "message_bytes": 1000,
            "activation_budget": [9, 8, 7, 6],
            "split": False,
            "recompute": True,
        }
    )
    assert (c.stages, c.microbatches, c.step_seconds, c.message_bytes) == (4, 12, 0.03, 1000)
    assert (c.forward, c.backward_input, c.backward_weight) == (
        (9e-3,) * 4,
        (0.01,) * 4,
        (6e-3,) * 4,
    )
    assert c.activation_budget == (9, 8, 7, 6)
    assert (c.split, c.recompute, c.chunks) == (False, True, 1)


def test_what_is_left_out():
    c = conditions_of({"stages": 2, "microbatches": 3, "forward_ms": 1, "backward_ms": [4, 6]})
    assert c.backward_input == c.backward_weight == (0.002, 0.003)
    assert c.links == {(0, 1): LinkState(), (1, 0): LinkState()}
    assert c.activation_budget == (math.inf, math.inf)
    assert (c.split, c.recompute, c.chunks, c.step_seconds) == (True, False, 1, 0.0)
