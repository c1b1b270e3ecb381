"""Colours of every picture, so that a forward looks the same on a page, in a PNG and in a trace.

The fills are calm, keep apart for colour-blind eyes (blue, orange, teal and purple differ in
lightness too) and carry dark text on a light and on a dark page alike.
"""

from __future__ import annotations

from megatron_adaptra.ir.op import Kind

OP_FILL = {
    Kind.F: "#8db9e2",
    Kind.B: "#f0b27a",
    Kind.I: "#f6cf9f",
    Kind.W: "#7fc8b4",
    Kind.R: "#bda6dc",
    Kind.TAIL: "#c3c8d0",
}
OP_NAME = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "recompute",
    Kind.TAIL: "tail and optimizer",
}
OP_TEXT = "#1d2733"
MESSAGE = "#cb4d7b"
SLOW_PHASE = "#d98032"
REPLAN = "#7d5fb2"
STOCK = "#8a93a1"
ADAPTRA = "#1a9694"
OTHER = ("#cb4d7b", "#3f7fc1", "#d98032", "#7d5fb2", "#4f9a4a", "#8a6d3b")


def op_fill(kind: Kind) -> str:
    return OP_FILL.get(kind, OP_FILL[Kind.TAIL])


def op_name(kind: Kind) -> str:
    return OP_NAME.get(kind, kind.value)


def arm_colour(name: str, index: int = 0) -> str:
    """Stock is grey, Adaptra teal; any further arm takes the next free colour."""
    return {"stock": STOCK, "adaptra": ADAPTRA}.get(name, OTHER[index % len(OTHER)])
