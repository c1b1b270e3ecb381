"""What is wrong with links, for people: slow, or out of bandwidth."""

from __future__ import annotations

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions

MOST_NAMED = 8  # links in a sentence


def slow_links(conditions: Conditions) -> str:
    """How a planner's sentence begins."""
    slow = [
        f"{a}->{b} {link_in_words(conditions, (a, b))}"
        for (a, b), link in sorted(conditions.links.items())
        if link.delay > 0 or conditions.wire(a, b) > 0
    ]
    return f"slow links {'; '.join(_first(slow))}: " if slow else "no slow link: "


def _first(links: list[str]) -> list[str]:
    """As many as a sentence may have, and how many there are besides."""
    if len(links) <= MOST_NAMED:
        return links
    return [*links[:MOST_NAMED], f"and {len(links) - MOST_NAMED} more"]


def link_in_words(conditions: Conditions | ReplicaConditions, link: tuple[int, int]) -> str:
    """What a message takes on `link`, and how much of it because of its bytes."""
    text = f"{1e3 * conditions.message_seconds(*link):.3g} ms"
    if wire := conditions.wire(*link):
        rate = conditions.link(*link).bandwidth / 1e6
        text += f", {1e3 * wire:.3g} for its bytes at {rate:.3g} MB/s"
    return text


def out_of_bandwidth(conditions: Conditions) -> str:
    """Which links set the pace of the pipeline, and what helps; empty where none does."""
    full = conditions.full_links
    if not full:
        return ""
    most = max(full, key=lambda link: conditions.wire(*link))
    names = ", ".join(_first([f"{a}->{b}" for a, b in full]))
    return (
        f"out of bandwidth: {names}; a message takes up to "
        f"{1e3 * conditions.wire(*most):.3g} ms there, a microbatch "
        f"{1e3 * conditions.microbatch_seconds:.3g} ms on the slowest stage. A deeper warmup hides "
        "delay, not this: only fewer bytes, or another link, make it faster"
    )
