"""Charts side by side under a headline, as one PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron_adaptra.view.charts import XYChart
from megatron_adaptra.view.png.plots import INCHES, draw_xy, save, write_header

HEAD, TALL, LEGEND = 1.55, 3.3, 1.35  # inches: above the charts, of them, below


def charts_png(
    path: str | os.PathLike[str],
    headline: str,
    leads: Sequence[str],
    charts: Sequence[XYChart],
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

    def draw(figure: Any, height: float) -> None:
        write_header(figure, height, headline, *leads)
        each = 1 / len(charts)
        for i, chart in enumerate(charts):
            left = i * each + 0.7 / INCHES
            right = (i + 1) * each - 0.25 / INCHES
            at = (left, LEGEND / height, right - left, TALL / height)
            axes = figure.add_axes(at)
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

    save(path, HEAD + TALL + LEGEND, draw)
