"""Colours of every picture, so that a forward looks the same on a page, in a PNG and in a trace.

The fills are calm, keep apart for colour-blind eyes (blue, orange, teal and purple differ in
lightness too) and carry dark text on a light and on a dark page alike. Which of them means what is
for those to say who make bars (`pipeline.py`).
"""

from __future__ import annotations

from colorsys import hls_to_rgb

BLUE = "#8db9e2"
ORANGE = "#f0b27a"
YELLOW = "#efd777"
TEAL = "#7fc8b4"
PURPLE = "#bda6dc"
GREY = "#c3c8d0"
ROSE = "#e3a3bd"
BOX_TEXT = "#1d2733"
MESSAGE = "#cb4d7b"
SLOW_PHASE = "#d98032"
REPLAN = "#7d5fb2"
STOCK = "#8a93a1"
ADAPTRA = "#1a9694"
BOUND = "#c9473d"
GROUPS = (
    "#3949ab", "#c0392b", "#1e8449", "#8e24aa", "#7a4a12", "#00707f", "#c2185b", "#4d5656",
)  # fmt: skip
OTHER = ("#cb4d7b", "#3f7fc1", "#d98032", "#7d5fb2", "#4f9a4a", "#8a6d3b")


_LIGHTER = 0.42  # how far from one shade to white the next one lies


def lighter(fill: str, steps: int) -> str:
    """The colour that is so many `steps` lighter than `fill`, both as `#rrggbb`."""
    keep = (1 - _LIGHTER) ** steps
    parts = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - keep * (255 - part)):02x}" for part in parts)


def group_colour(group: int) -> str:
    """The colour of that `group` of rows: strong, as it stands as a stripe on a calm one."""
    if group < len(GROUPS):
        return GROUPS[group]
    hue = (0.618034 * group) % 1.0  # the golden angle: neighbours are far from each other
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, 0.36, 0.65))


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
    return POLICY.get(name, BOX_TEXT)


def arm_colour(name: str, index: int = 0) -> str:
    """The colour of the arm called `name`: stock is grey, adaptra teal.

    Any further one, the `index`-th arm of all, takes the next free colour.
    """
    return {"stock": STOCK, "adaptra": ADAPTRA}.get(name, OTHER[index % len(OTHER)])
