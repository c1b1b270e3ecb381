"""Files that users name are read within limits."""

import pytest

from megatron_adaptra.base.errors import BadFile
from megatron_adaptra.base.user_files import (
    MOST_YAML,
    files_in,
    parse_json,
    parse_yaml,
    read_bytes,
    read_text,
)


def test_of_a_long_file_only_the_beginning_is_read(tmp_path):
    path = tmp_path / "text"
    with path.open("wb") as file:
        file.write(b"begin")
        file.truncate(2**40)  # takes no room, and no memory has it
    assert read_bytes(path, "--text", 7) == b"begin\0\0"
    with pytest.raises(BadFile, match=f"--text '.*': it has more than {MOST_YAML} bytes"):
        read_text(path, "--text", MOST_YAML)


def test_a_folder_is_read_file_by_file(tmp_path):
    names = ["b", "a/c", "a/b/c", "z/y"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "up").symlink_to(tmp_path)  # a circle is not followed
    found = [str(path.relative_to(tmp_path)) for path in files_in(tmp_path)]
    assert found == ["b", "a/c", "a/b/c", "z/y"]
    assert list(files_in(tmp_path / "b")) == [tmp_path / "b"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' stands twice"),
        ("[" * 40 + "]" * 40, "nested too deeply"),
        ('["\\ud800"]', "holds a character that is no text"),
        ('{"\\u0000": 1}', "holds a character that is no text"),
    ],
)
def test_json_that_is_refused(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\nb: [", r"line 2: expected the node content"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' stands twice"),
        ("a: 1\nb: *c", r"line 2: an anchor or alias \(& or \*\) stands here"),
        ("a: 1\n---\nb: 2", "line 2: expected a single document in the stream, but found another"),
    ],
)
def test_what_is_wrong_in_yaml_has_a_line(text, fault):
    with pytest.raises(ValueError, match=f"^{fault}"):
        parse_yaml(text)


@pytest.mark.parametrize(
    "number", ["1_0", "0x10", "1:30", "010", "0b11", "-1_0.5", "1:30.5", "+0x1"]
)
def test_numbers_that_yaml_reads_as_others_are_refused(number):
    for text in (f"b: 1\na: {number}", f"b: 1\na: [{number}]", f"b: 1\n{number}: 1"):
        with pytest.raises(ValueError, match=r"^line 2: .* write numbers in decimal digits"):
            parse_yaml(text)
    assert parse_yaml(f"a: '{number}'") == {"a": number}


def test_decimal_numbers_of_yaml_are_read():
    text = "[0, 10, -3, +4, 0.5, .5, 5., 1.5e+3, .inf, -.inf]"
    assert parse_yaml(text) == [0, 10, -3, 4, 0.5, 0.5, 5.0, 1500.0, float("inf"), -float("inf")]
