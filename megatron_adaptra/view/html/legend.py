"""Legends of pictures in a page: HTML, so that they wrap where the page is narrow."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.charts import Curve
from megatron_adaptra.view.legend import legend_keys
from megatron_adaptra.view.markup import element, text


def gantt_legend(gantts: Sequence[Gantt], seconds: float) -> str:
    """Return the legend of `gantts` that are drawn on an axis of `seconds`."""
    items = []
    for key in legend_keys(gantts, seconds):
        if key.line:
            signs = [_sign("message", f"border-color:{key.fills[0]}")]
        else:
            signs = [_sign(None, f"background:{fill}") for fill in key.fills]
        items.append(element("span", *signs, text(key.words)))
    return element("p", *items, class_="legend")


def curves_legend(curves: Sequence[Curve]) -> str:
    """Names and signs of the curves."""
    items = []
    for curve in curves:
        if curve.joined:
            style = f"border-color:{curve.colour}" + (";border-top-style:dashed" * curve.dashed)
            sign = _sign("message", style)
        else:
            sign = _sign("dot", f"background:{curve.colour}")
        items.append(element("span", sign, text(curve.name)))
    return element("p", *items, class_="legend")


def _sign(kind: str | None, style: str) -> str:
    return element("i", class_=kind, style=style)
