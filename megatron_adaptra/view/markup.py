"""Elements of SVG and HTML, with every attribute and text escaped in one place."""

from __future__ import annotations

from collections.abc import Iterable
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
