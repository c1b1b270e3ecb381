"""Elements of SVG and HTML, with every attribute and text escaped in one place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

FONT = "font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif"


def element(name: str, *content: str, **attributes: object) -> str:
    """`<name ...>content</name>`, of that `name`; content is markup already, see `text`.

    `font_size=3` becomes `font-size="3"`, `class_` becomes `class`; None leaves an attribute out.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(str(shown))}"')
    return f"<{' '.join(words)}>{''.join(content)}</{name}>"


def text(value: object) -> str:
    """Any `value` as text that is safe inside an element."""
    return escape(str(value))


def prose(value: object) -> str:
    """`value` as `text` in which no flag and no arrow is broken at the end of a line."""
    return re.sub(r"--[a-z][\w-]*|-&gt;", r'<span class="whole">\g<0></span>', text(value))


def picture(parts: Iterable[str], width: float, height: float, kind: str, margin: float = 0) -> str:
    """The outermost element of a drawing, around its `parts`; `kind` is its class.

    `width` and `height`: pixels, to which `margin` adds on every side.
    """
    wide, high = width + 2 * margin, height + 2 * margin
    return element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"{-margin} {-margin} {wide} {high}",
        width=wide,
        height=high,
        role="img",
        style=FONT,
        fill="currentColor",
        class_=kind,
    )


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
