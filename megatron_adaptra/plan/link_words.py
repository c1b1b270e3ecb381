"""Descriptions of links and ports for people: slow, or out of bandwidth."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions

MOST_NAMED = 8  # links in a sentence


def slow_links(conditions: Conditions) -> str:
    """Describe the slow links, or that there is none, as the start of a planner's sentence."""
    slow = [
        f"{a}->{b} {link_in_words(conditions, (a, b))}"
        for (a, b), link in sorted(conditions.links.items())
        if link.delay > 0 or conditions.passes(a, b) > 0
    ]
    shared = ports_in_words(conditions, conditions.links)
    return f"slow links {'; '.join(first_of(slow))}{shared}: " if slow else "no slow link: "


def first_of(links: list[str]) -> list[str]:
    """Return as many `links` as a sentence may name, and the number of the others."""
    if len(links) <= MOST_NAMED:
        return links
    return [*links[:MOST_NAMED], f"and {len(links) - MOST_NAMED} more"]


def link_in_words(conditions: Conditions | ReplicaConditions, link: tuple[int, int]) -> str:
    """Describe the milliseconds of a message on `link`, and how many of them its bytes take."""
    text = f"{1e3 * conditions.message_seconds(*link):.3g} ms"
    if seconds := conditions.passes(*link):
        rate = conditions.message_bytes / seconds / 1e6
        text += f", {1e3 * seconds:.3g} for its bytes at {rate:.3g} MB/s"
    return text


def ports_in_words(
    conditions: Conditions | ReplicaConditions, links: Iterable[tuple[int, int]]
) -> str:
    """Describe the limited ports at the ends of `links`, to end a sentence; empty without any."""
    ends = sorted({worker for link in links for worker in link})
    return "".join(
        f"; {conditions.name(worker)} passes {conditions.message_bytes / seconds / 1e6:.3g} MB/s "
        "over all its links together"
        for worker in ends
        if (seconds := conditions.port(worker)) > 0
    )


def out_of_bandwidth(conditions: Conditions) -> str:
    """Describe the links that set the pace of the pipeline, and what helps; empty without any."""
    full = conditions.full_links
    if not full:
        return ""
    busy = max(conditions.busy(*link) for link in full)
    names = ", ".join(first_of([f"{a}->{b}" for a, b in full]))
    return (
        f"out of bandwidth: {names}; the messages of a microbatch take up to {1e3 * busy:.3g} ms "
        f"there, a microbatch {1e3 * conditions.microbatch_seconds:.3g} ms on the slowest stage. A "
        "deeper warmup hides delay, not this: only fewer bytes, or another link, make it faster"
    )
