"""Charts side by side under a headline, as one PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron_adaptra.view.charts import DotChart, XYChart
from megatron_adaptra.view.png.plots import INCHES, draw_dots, draw_xy, save, write_header

HEAD, LEGEND = 1.55, 1.35  # inches above and below the charts


def charts_png(
    path: str | os.PathLike[str],
    headline: str,
    leads: Sequence[str],
    charts: Sequence[XYChart | DotChart],
) -> None:
    """Write charts side by side.

    Args:
        path: of the PNG file.
        headline: stands over all, in large type.
        leads: lines of text beneath it.
        charts: from left to right.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = max((len(c.rows) for c in charts if isinstance(c, DotChart)), default=0)
    tall = max(3.3, 0.27 * rows)

    def draw(figure: Any, height: float) -> None:
        write_header(figure, height, headline, *leads)
        each = 1 / len(charts)
        for i, chart in enumerate(charts):
            names = chart.rows if isinstance(chart, DotChart) else ()
            left = i * each + (0.7 + 0.075 * max(map(len, names), default=0)) / INCHES
            right = (i + 1) * each - 0.25 / INCHES
            at = (left, LEGEND / height, right - left, tall / height)
            axes = figure.add_axes(at)
            if isinstance(chart, DotChart):
                draw_dots(axes, chart)
            else:
                draw_xy(axes, chart)
            handles, words = axes.get_legend_handles_labels()
            figure.legend(
                handles,
                words,
                loc="upper left",
                bbox_to_anchor=(i * each + 0.3 / INCHES, (LEGEND - 0.6) / height),
                ncols=2 if max(map(len, words), default=0) > 22 else 3,
                frameon=False,
                fontsize=8.5,
                columnspacing=1.4,
                borderaxespad=0,
            )

    save(path, HEAD + tall + LEGEND, draw)
