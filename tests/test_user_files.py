"""Files that users name are read within limits."""

import pytest

from megatron_adaptra.errors import BadFile
from megatron_adaptra.user_files import MOST_YAML, files_in, parse_json, read_bytes, read_text


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
        ("[" * 10**6, "nested too deeply"),
        ('["\\ud800"]', "holds a character that is no text"),
        ('{"\\u0000": 1}', "holds a character that is no text"),
    ],
)
def test_json_that_is_refused(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse_json(text)
