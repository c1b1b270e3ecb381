"""`adaptra draw`: every format is valid and shows the whole schedule."""

import json
import xml.etree.ElementTree as ET

import pytest
from commands import SMALL, process, strict
from pages import SVG, page, titles, words
from read_timeline import timeline_of

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.files import MARKER
from megatron_adaptra.cli.draw import targets

ALL = ("ascii", "svg", "html", "trace")


def spans(here, *more):
    timeline = timeline_of(here.json("draw", *SMALL, *more)["timeline"])
    return [f"{s.op}" for s in timeline.spans], timeline


def test_the_terminal_shows_all_stages_and_a_legend():
    out = process("draw", *SMALL, "--policy", "zb-h1", "--width", 300).stdout
    job, head, *rows, ruler, legend = out.splitlines()
    assert job == "3 stages × 6 microbatches, link 1–2 slower by 20 ms"
    assert head.startswith("zb-h1: ")
    assert [row.split()[:2] for row in rows] == [["stage", str(i)] for i in range(3)]
    assert max(map(len, rows)) == 300
    for microbatch in range(6):
        assert all(f"{kind}{microbatch}" in row for row in rows for kind in "FIW")
    assert "0 ms" in ruler
    for kind in ("forward", "input gradient", "weight gradient"):
        assert kind in legend
    assert "\x1b" not in out


@pytest.mark.parametrize("policy", ["zb-h2", "interleaved"])
def test_a_folder_gets_every_format_with_every_op(here, tmp_path, policy):
    job = ("--policy", policy, "--chunks", 2 if policy == "interleaved" else 1)
    expected, timeline = spans(here, *job)
    out, _ = here("draw", *SMALL, *job, "--out", tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    names = [f"{policy}{suffix}" for suffix in (".txt", ".svg", ".html", ".trace.json")]
    assert out.split() == [str(folder / name) for name in names]
    assert {path.name for path in folder.iterdir()} == {MARKER, *names}

    shown = titles(ET.fromstring((folder / names[1]).read_text()))
    assert sorted(t.split()[0] for t in shown if "duration" in t) == sorted(expected)
    root = page(folder / names[2])
    assert sorted(t.split()[0] for t in titles(root) if "duration" in t) == sorted(expected)
    assert f"{policy}: " in words(root)

    events = strict((folder / names[3]).read_text())["traceEvents"]
    drawn = {(e["tid"] - 1, e["name"]): e["ts"] for e in events if e["ph"] == "X"}
    assert len(drawn) == len(timeline.spans)
    for span in timeline.spans:
        assert drawn[span.stage, str(span.op)] == pytest.approx(1e6 * span.start, abs=0.01)
    assert sum(e["ph"] == "b" for e in events) == len(timeline.messages)


def test_kinds_and_chunks_have_colours_of_their_own(here, tmp_path):
    """An op of a later chunk is lighter; recompute is seen, too."""
    schedule = tmp_path / "s.json"
    lines = [["F0", "F0.1", "R0.1", "B0.1", "R0", "I0", "W0"]]
    schedule.write_text(json.dumps({"stages": lines}))
    here("draw", "--schedule", schedule, "--out", tmp_path / "s.svg")
    root = ET.fromstring((tmp_path / "s.svg").read_text())
    fills = {}
    for group in root.iter(f"{SVG}g"):
        fills[group.find(f"{SVG}title").text.split()[0]] = group.find(f"{SVG}rect").get("fill")
    assert sorted(fills) == sorted(lines[0])
    assert len(set(fills.values())) == len(fills)
    assert sum(int(fills["F0.1"][i : i + 2], 16) for i in (1, 3, 5)) > sum(
        int(fills["F0"][i : i + 2], 16) for i in (1, 3, 5)
    )
    printed = words(root)
    for name in ("F forward", "B backward", "R recompute", "W weight gradient", "chunk 0, 1"):
        assert name in printed
    assert "all ops equally long" in printed


@pytest.mark.parametrize("kind", ["svg", "ascii"])
def test_one_text_format_goes_to_a_pipe(here, tmp_path, kind, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # a file is that wide, a terminal may be another
    out, _ = here("draw", *SMALL, "--policy", "1f1b", "--format", kind)
    path = tmp_path / f"a.{kind}"
    here("draw", *SMALL, "--policy", "1f1b", "--format", kind, "--out", path)
    assert path.read_text() == out


@pytest.mark.parametrize(
    ("formats", "out", "expected"),
    [
        ([], None, (["ascii"], False)),
        (["svg"], None, (["svg"], False)),
        ([], "a.svg", (["svg"], False)),
        ([], "a.trace.json", (["trace"], False)),
        (["html"], "a.picture", (["html"], False)),
        ([], "new", (list(ALL), True)),
        (["svg", "html"], "new", (["svg", "html"], True)),
    ],
)
def test_where_it_goes(formats, out, expected):
    assert targets(formats, out) == expected


@pytest.mark.parametrize(
    ("formats", "out", "line"),
    [
        (["gif"], None, "--format 'gif': it has to be some of ascii, svg, html, trace"),
        (["svg", "html"], None, "--format 'svg,html': it needs --out"),
        (["svg", "html"], "a.svg", "--out 'a.svg': it has to be a folder, for several formats"),
        ([], "a.pdf", "--out 'a.pdf': it has to be a folder, or a file whose name ends with"),
    ],
)
def test_where_it_cannot_go(formats, out, line):
    with pytest.raises(BadInput) as refused:
        targets(formats, out)
    assert str(refused.value).startswith(line)


def test_bad_places_and_widths(here, tmp_path):
    (tmp_path / "file").write_text("")
    line = here.refused("draw", *SMALL, "--out", tmp_path / "file" / "a.svg")
    assert line.startswith("--out ")
    assert "it cannot be written: " in line
    assert here.refused("draw", *SMALL, "--width", 5).startswith("--width 5: it has to be from ")
    assert here.refused("draw", *SMALL, "--format", "svg", "--width", 100).endswith(
        "from 300 to 20000"
    )


@pytest.mark.parametrize(
    ("policy", "name"),
    [("../../x", "x"), ("/proc/x", "proc-x"), ("..", "schedule"), (9 * "\n", "schedule")],
)
def test_a_schedules_policy_names_a_file_in_the_folder_and_no_other(here, tmp_path, policy, name):
    schedule, folder = tmp_path / "schedule", tmp_path / "deep" / "folder"
    schedule.write_text(json.dumps({"policy": policy, "stages": [["F0", "B0"]]}))
    here("draw", "--schedule", schedule, "--format", "svg", "--out", folder)
    assert {path.name for path in folder.iterdir()} == {MARKER, f"{name}.svg"}
    assert {path.name for path in tmp_path.iterdir()} == {"schedule", "deep"}


@pytest.mark.parametrize("command", ["draw", "compare"])
def test_a_folder_of_the_users_is_left_as_it_is(here, tmp_path, command):
    (tmp_path / f"{command}.html").write_text("mine")
    line = here.refused(command, *SMALL, "--out", tmp_path)
    assert line == (
        f"--out '{tmp_path}': it holds files that are not adaptra's; name a new folder, or an "
        "empty one"
    )
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_drawing_is_not_written_over_its_schedule(here, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"stages": [["F0", "B0"]]}))
    before = plan.read_text()
    line = here.refused("draw", "--schedule", plan, "--out", plan)
    assert line.endswith("it is the file of --schedule; name another one")
    assert plan.read_text() == before
