"""What is no pipeline is drawn by the same pictures: here the gradients of four ranks are added.

A ring: in three rounds each rank adds what came to a part of its own and passes the sum on, and in
three more the sums go round. One link is slow.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megatron_adaptra.view.ascii import ascii_gantt, ascii_legend
from megatron_adaptra.view.bars import Arrow, Bar, Category, Gantt
from megatron_adaptra.view.chrome import chrome_trace
from megatron_adaptra.view.drawing import Drawing, Table, drawing_html, drawing_png, drawing_svg
from megatron_adaptra.view.theme import MESSAGE, ORANGE, TEAL

RANKS, SLOW_LINK = 4, (2, 3)
ROUNDS = 2 * (RANKS - 1)
REDUCE = Category("add what came to one's own", ORANGE, "+", "r")
GATHER = Category("keep the sum", TEAL, "-", "g")
SVG = "{http://www.w3.org/2000/svg}"


def ring() -> Gantt:
    """Every rank works for 4 ms in each round; a message takes 1 ms, over the slow link 10."""
    bars: list[Bar] = []
    arrows: list[Arrow] = []
    ready = [0.0] * RANKS
    for step in range(ROUNDS):
        category, word = (REDUCE, "reduce") if step < RANKS - 1 else (GATHER, "gather")
        ends = []
        for rank in range(RANKS):
            label = f"{word} {(rank - step) % RANKS}"
            end = ready[rank] + 0.004
            bars.append(Bar(rank, label, ready[rank], end, category, inside=(label, label[-1])))
            ends.append(end)
        for rank, end in enumerate(ends if step < ROUNDS - 1 else ()):
            after = (rank + 1) % RANKS
            there = end + (0.010 if (rank, after) == SLOW_LINK else 0.001)
            here = len(bars) - RANKS
            arrows.append(Arrow(rank, after, bars[here + rank].label, end, there))
            ready[after] = max(there, ends[after])
    return Gantt("rank", RANKS, (REDUCE, GATHER), tuple(bars), tuple(arrows), "ring")


def drawing() -> Drawing:
    return Drawing(
        name="ring",
        job="4 ranks, link 2–3 slower by 9 ms",
        why="every part goes round twice",
        gantt=ring(),
        bound=0.03,
        title="The rounds",
        figures=[("6 rounds", "three that add, three that hand on")],
        table=Table("Rank by rank", ("", "adds"), [("rank 0", "3 times")]),
    )


def pictures_of_text() -> dict[str, str]:
    gantt = ring()
    return {
        "ascii": ascii_gantt(gantt, 160) + ascii_legend(gantt),
        "svg": drawing_svg(drawing()),
        "html": drawing_html(drawing()),
    }


@pytest.mark.parametrize("kind", ["ascii", "svg", "html"])
def test_rows_and_categories_have_the_names_that_they_were_given(kind: str) -> None:
    picture = pictures_of_text()[kind]
    for words in ("rank 0", "rank 3", "what came to one", "keep the sum", "reduce 2", "gather 1"):
        assert words in picture
    assert not re.search(r"\bstage|\bop\b|forward|iteration|microbatch", picture)


def test_text_fills_bars_by_category_and_shortens_labels() -> None:
    gantt = ring()
    wide, narrow = (ascii_gantt(gantt, width).splitlines() for width in (160, 44))
    assert "rank 1 |reduce 1+" in wide[2]
    assert re.search(r"gather 3-+\.+\|$", wide[1])
    assert re.fullmatch(r"rank 1 \|(\.*r\+*){3}(\.*g-*){3}\.*\|", narrow[2])
    assert ascii_legend(gantt) == "r+++ add what came to one's own   g--- keep the sum"


def test_boxes_and_slow_messages_stand_where_they_belong() -> None:
    gantt, root = ring(), ET.fromstring(drawing_svg(drawing()))
    titles = [e.text or "" for e in root.iter(f"{SVG}title")]
    for bar in gantt.bars:
        assert sum(title.startswith(f"{bar.label}\nstart") for title in titles) == RANKS - 1
    lines = [e for e in root.iter(f"{SVG}line") if e.get("stroke") == MESSAGE]
    over = [line.findtext(f"{SVG}title") or "" for line in lines]
    slow = [title for title in over if "from rank 2 to 3" in title and "under way 10 ms" in title]
    assert len(slow) == ROUNDS - 1
    rows = sorted({float(rect.get("y", "nan")) for rect in root.iter(f"{SVG}rect")})
    assert len(rows) == RANKS + 1  # and the legend


def test_a_trace_has_a_thread_for_each_row_and_a_track_for_each_link() -> None:
    gantt = ring()
    events = chrome_trace({"ring": gantt})["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == [f"rank {i}" for i in range(RANKS)]
    found = {(e["tid"] - 1, e["name"], e["ts"]) for e in events if e["ph"] == "X"}
    assert found == {(bar.row, bar.label, round(1e6 * bar.start, 3)) for bar in gantt.bars}
    links = {e["name"] for e in events if e["ph"] == "b"}
    assert links == {f"link {i} to {(i + 1) % RANKS}" for i in range(RANKS)}
    assert not [e for e in events if e["ph"] in "sf"]  # nothing says which bars a message joins


def test_a_message_joins_the_bars_that_it_names() -> None:
    bars = tuple(Bar(i, f"reduce {i}", float(i), i + 1.0, REDUCE) for i in range(2))
    gantt = Gantt("rank", 2, (REDUCE,), bars, (Arrow(0, 1, "sum", 0.5, 1.0, joins=(0, 1)),))
    events = chrome_trace({"a": gantt})["traceEvents"]
    ends = [(e["ph"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert ends == [("s", 1, 0.0), ("f", 2, 1e6)]


def test_the_png_shows_every_row_in_the_colours_of_its_categories(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "ring.png"
    drawing_png(drawing(), path)
    pixels = (255 * image.imread(path)[..., :3]).round().astype(int)
    for fill in (ORANGE, TEAL):
        wanted = [int(fill[i : i + 2], 16) for i in (1, 3, 5)]
        heights = (pixels == wanted).all(axis=2).any(axis=1)  # which lines of pixels have it
        bands = int((heights[1:] & ~heights[:-1]).sum())
        assert bands == RANKS + 1, fill  # and the legend
