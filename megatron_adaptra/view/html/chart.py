"""A chart in a page."""

from __future__ import annotations

from megatron_adaptra.view.charts import XYChart
from megatron_adaptra.view.html.legend import curves_legend
from megatron_adaptra.view.html.page import section
from megatron_adaptra.view.markup import element
from megatron_adaptra.view.svg.xy_chart import xy_chart_svg


def chart_section(chart: XYChart) -> str:
    """A card with a chart and its legend: markup."""
    picture = element("div", xy_chart_svg(chart), class_="scroll")
    return section(chart.title, curves_legend(chart.curves), picture, note=chart.note)
