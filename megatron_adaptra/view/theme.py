"""Colours of every picture, so that a forward looks the same on a page, in a PNG and in a trace.

The fills are calm, keep apart for colour-blind eyes (blue, orange, teal and purple differ in
lightness too) and carry dark text on a light and on a dark page alike. Each chunk of a stage after
the first is lighter than the one before.
"""

from __future__ import annotations

from megatron_adaptra.ir.op import Kind

OP_FILL = {
    Kind.F: "#8db9e2",
    Kind.B: "#f0b27a",
    Kind.I: "#efd777",
    Kind.W: "#7fc8b4",
    Kind.R: "#bda6dc",
    Kind.STEP: "#c3c8d0",
    Kind.SYNC: "#e3a3bd",
}
OP_NAME = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "recompute",
    Kind.STEP: "optimizer step",
    Kind.SYNC: "collective of the step",
}
OP_TEXT = "#1d2733"
MESSAGE = "#cb4d7b"
SLOW_PHASE = "#d98032"
REPLAN = "#7d5fb2"
STOCK = "#8a93a1"
ADAPTRA = "#1a9694"
BOUND = "#c9473d"
OTHER = ("#cb4d7b", "#3f7fc1", "#d98032", "#7d5fb2", "#4f9a4a", "#8a6d3b")


_LIGHTER = 0.42  # how far from one chunk's colour to white the next chunk's lies


def op_fill(kind: Kind, chunk: int = 0) -> str:
    """The colour of an op of the `chunk`-th chunk, as `#rrggbb`."""
    fill = OP_FILL.get(kind, OP_FILL[Kind.STEP])
    keep = (1 - _LIGHTER) ** chunk
    parts = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - keep * (255 - part)):02x}" for part in parts)


def op_name(kind: Kind) -> str:
    """What people call it."""
    return OP_NAME.get(kind, kind.value)


POLICY = {
    "1f1b": STOCK,
    "adaptive": ADAPTRA,
    "adaptive + recompute": REPLAN,
    "gpipe": "#8a6d3b",
    "interleaved": "#4f9a4a",
    "warmup": "#3f7fc1",
    "zb-h1": "#d98032",
    "zb-h2": MESSAGE,
}


def policy_colour(name: str) -> str:
    """The colour of the policy called `name`."""
    return POLICY.get(name, OP_TEXT)


def arm_colour(name: str, index: int = 0) -> str:
    """The colour of the arm called `name`: stock is grey, adaptra teal.

    Any further one, the `index`-th arm of all, takes the next free colour.
    """
    return {"stock": STOCK, "adaptra": ADAPTRA}.get(name, OTHER[index % len(OTHER)])
