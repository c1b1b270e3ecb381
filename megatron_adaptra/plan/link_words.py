"""What is wrong with links, for people: slow, or out of bandwidth."""

from __future__ import annotations

from megatron_adaptra.ir.conditions import Conditions

MOST_NAMED = 8  # links in a sentence


def slow_links(conditions: Conditions) -> str:
    """How a planner's sentence begins."""
    slow = [
        f"{a}->{b} {link_in_words(conditions, (a, b))}"
        for (a, b), link in sorted(conditions.links.items())
        if link.delay > 0 or conditions.wire(a, b) > 0
    ]
    if len(slow) > MOST_NAMED:
        slow = [*slow[:MOST_NAMED], f"and {len(slow) - MOST_NAMED} more"]
    return f"slow links {'; '.join(slow)}: " if slow else "no slow link: "


def link_in_words(conditions: Conditions, link: tuple[int, int]) -> str:
    """What a message takes on `link`, and how much of it because of its bytes."""
    delay, wire = conditions.link(*link).delay, conditions.wire(*link)
    if not wire:
        return f"{1e3 * delay:.3g} ms"
    rate = conditions.link(*link).bandwidth / 1e6
    return f"{1e3 * (delay + wire):.3g} ms, {1e3 * wire:.3g} for its bytes at {rate:.3g} MB/s"


def out_of_bandwidth(conditions: Conditions) -> str:
    """Which links set the pace of the pipeline, and what helps; empty where none does."""
    full = conditions.full_links
    if not full:
        return ""
    most = max(full, key=lambda link: conditions.wire(*link))
    names = [f"{a}->{b}" for a, b in full]
    if len(names) > MOST_NAMED:
        names = [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"]
    return (
        f"out of bandwidth: {', '.join(names)}; a message takes up to "
        f"{1e3 * conditions.wire(*most):.3g} ms there, a microbatch "
        f"{1e3 * conditions.microbatch_seconds:.3g} ms on the slowest stage. A deeper warmup hides "
        "delay, not this: only fewer bytes, or another link, make it faster"
    )
