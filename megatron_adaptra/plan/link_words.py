"""What is wrong with links and ports, for people: slow, or out of bandwidth."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions

MOST_NAMED = 8  # links in a sentence


def slow_links(conditions: Conditions) -> str:
    """How a planner's sentence begins."""
    slow = [
        f"{a}->{b} {link_in_words(conditions, (a, b))}"
        for (a, b), link in sorted(conditions.links.items())
        if link.delay > 0 or conditions.passes(a, b) > 0
    ]
    shared = ports_in_words(conditions, conditions.links)
    return f"slow links {'; '.join(_first(slow))}{shared}: " if slow else "no slow link: "


def _first(links: list[str]) -> list[str]:
    """As many as a sentence may have, and how many there are besides."""
    if len(links) <= MOST_NAMED:
        return links
    return [*links[:MOST_NAMED], f"and {len(links) - MOST_NAMED} more"]


def link_in_words(conditions: Conditions | ReplicaConditions, link: tuple[int, int]) -> str:
    """What a message takes on `link`, and how much of it because of its bytes."""
    text = f"{1e3 * conditions.message_seconds(*link):.3g} ms"
    if seconds := conditions.passes(*link):
        rate = conditions.message_bytes / seconds / 1e6
        text += f", {1e3 * seconds:.3g} for its bytes at {rate:.3g} MB/s"
    return text


def ports_in_words(
    conditions: Conditions | ReplicaConditions, links: Iterable[tuple[int, int]]
) -> str:
    """What the `links` share with others at their ends, as the end of a sentence; or empty."""
    ends = sorted({worker for link in links for worker in link})
    return "".join(
        f"; {conditions.name(worker)} passes {conditions.message_bytes / seconds / 1e6:.3g} MB/s "
        "over all its links together"
        for worker in ends
        if (seconds := conditions.port(worker)) > 0
    )


def out_of_bandwidth(conditions: Conditions) -> str:
    """Which links set the pace of the pipeline, and what helps; empty where none does."""
    full = conditions.full_links
    if not full:
        return ""
    busy = max(conditions.busy(*link) for link in full)
    names = ", ".join(_first([f"{a}->{b}" for a, b in full]))
    return (
        f"out of bandwidth: {names}; the messages of a microbatch take up to {1e3 * busy:.3g} ms "
        f"there, a microbatch {1e3 * conditions.microbatch_seconds:.3g} ms on the slowest stage. A "
        "deeper warmup hides delay, not this: only fewer bytes, or another link, make it faster"
    )
