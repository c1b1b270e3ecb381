"""A timeline, read from what commands print of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_adaptra.ir.op import Op
from megatron_adaptra.ir.timeline import Message, Span, Timeline


def timeline_of(data: Mapping[str, Any]) -> Timeline:
    """The timeline that `to_json` has turned into `data`."""
    return Timeline(
        tuple(Span(s, Op.parse(op), a, b) for s, op, a, b in data["spans"]),
        tuple(Message(s, t, Op.parse(op), *times) for s, t, op, *times in data["messages"]),
        data["name"],
        data.get("replicas", 1),
        data.get("stages", 0),
    )
