"""The parts that every chart is made of; lengths are pixels."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.view.markup import element, text


def label(
    word: str, x: float, y: float, anchor: str = "middle", size: float = 12, opacity: float = 0.75
) -> str:
    """A quiet `word` of font size `size`; `x` is its middle, or its `anchor`: "start", "end".

    `y` is its base line, `opacity` 0 to 1.
    """
    where = {"x": float(x), "y": float(y), "text_anchor": anchor}
    return element("text", text(word), **where, font_size=size, fill_opacity=opacity)


def rule(x1: float, x2: float, y1: float, y2: float, opacity: float = 0.12) -> str:
    """A line in the page's colour from (`x1`, `y1`) to (`x2`, `y2`), of `opacity` 0 to 1."""
    ends = {"x1": float(x1), "x2": float(x2), "y1": float(y1), "y2": float(y2)}
    return element("line", **ends, stroke="currentColor", stroke_opacity=opacity)


def polyline(points: Sequence[tuple[float, float]], colour: str, dashes: str | None) -> str:
    """A line of that `colour` through all `points`.

    `dashes` as in SVG's stroke-dasharray, None for a solid one.
    """
    return element(
        "polyline",
        points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
        fill="none",
        stroke=colour,
        stroke_width=2,
        stroke_linejoin="round",
        stroke_dasharray=dashes,
    )
