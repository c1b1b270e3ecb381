"""The legend inside a drawing that stands alone."""

from __future__ import annotations

from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.legend import legend_keys
from megatron_adaptra.view.markup import element, text


def legend_svg(gantt: Gantt, seconds: float, x: float, y: float) -> list[str]:
    """One line of boxes and words for an axis of `seconds`, from pixel `x` on, at height `y`."""
    parts = []
    for key in legend_keys([gantt], seconds):
        for fill in key.fills:
            if key.line:
                ends = {"x1": x, "x2": x + 12, "y1": y - 4, "y2": y - 4}
                parts.append(element("line", **ends, stroke=fill, stroke_width=2))
            else:
                parts.append(element("rect", x=x, y=y - 9, width=11, height=11, rx=2, fill=fill))
            x += 14.0
        x += 3.0
        parts.append(element("text", text(key.words), x=x, y=y, font_size=11, fill_opacity=0.8))
        x += 6.0 * len(key.words) + 14
    return parts
