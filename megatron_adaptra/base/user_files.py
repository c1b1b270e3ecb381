"""Files that a user names: read within limits, so that no file can hang or flood a command.

Only regular files, as a pipe or a device may never end; of a limited size, in UTF-8. Keys stand
once. YAML is plain: what anchors, aliases and tags could do, settings do not need, and numbers are
decimal, as YAML reads 010 as 8, 1_0 as 10 and 1:30 as 90.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import BadFile, line_of, shown

MOST_BYTES = 2**26  # a schedule of a million ops takes a fifth of it
MOST_YAML = 2**18  # which takes seconds: YAML is read a thousand times more slowly than JSON
DEEPEST = 20  # lists and objects inside each other
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_DECIMAL = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|"
    r"\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)


def read_text(path: str | os.PathLike[str], field: str, most: int = MOST_BYTES) -> str:
    """Read the text of the regular file at `path`.

    Raises BadFile, which calls it `field`, for one that cannot be read, that is no UTF-8 text, or
    that has more than `most` bytes.
    """
    data = read_bytes(path, field, most + 1)
    if len(data) > most:
        raise BadFile(field, path, f"it has more than {most} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadFile(field, path, "it is no UTF-8 text") from None


def read_bytes(path: str | os.PathLike[str], field: str, most: int) -> bytes:
    """Read the first bytes, `most` at most, of the regular file at `path`.

    Raises BadFile, which calls it `field`.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise BadFile(field, path, "it is a pipe, a socket or a device; name a regular file")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(most) or b""
    except OSError as error:
        raise BadFile(field, path, f"it cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL, say
        raise BadFile(field, path, "no file can have such a name") from None


def files_in(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The regular files in the folder at `path`, and in folders inside it; or the file itself."""
    if not os.path.isdir(path):
        yield Path(path)
    for folder, inside, names in os.walk(path):
        inside.sort()
        yield from (one for name in sorted(names) if (one := Path(folder, name)).is_file())


def read_data(path: str | os.PathLike[str], field: str) -> Any:
    """Read the data in the file at `path`: JSON if its name ends in .json, else YAML.

    Raises BadFile, which calls it `field`.
    """
    name = "JSON" if os.fspath(path).endswith(".json") else "YAML"
    text = read_text(path, field, MOST_BYTES if name == "JSON" else MOST_YAML)
    try:
        return parse_json(text) if name == "JSON" else parse_yaml(text)
    except ValueError as error:
        raise BadFile(field, path, f"it is not {name}: {line_of(error)}") from None


def parse_json(text: str) -> Any:
    """Read the one value in a JSON `text`. Raises ValueError, as for equal keys or great depth."""
    try:
        return _checked(json.loads(text, object_pairs_hook=_object))
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Read the one value in a YAML `text`. Raises ValueError, as `parse_json` does."""
    import yaml

    try:
        return _checked(yaml.load(text, _loader()))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        problem = error.problem or ""
        if problem.startswith("but "):  # the end of a sentence
            problem = f"{error.context}, {problem}"
        raise ValueError(where + line_of(problem or error.context)) from None
    except (yaml.YAMLError, OverflowError) as error:  # OverflowError: no such date
        raise ValueError(line_of(error)) from None
    except RecursionError:
        raise ValueError("its lists and mappings are nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {shown(key)} stands twice")
        out[key] = value
    return out


def _checked(data: Any, depth: int = 0) -> Any:
    """Return `data`; raise ValueError if it is too deep, or a text has NUL or a surrogate."""
    if isinstance(data, str):
        if "\0" in data or (not data.isascii() and any("\ud800" <= c <= "\udfff" for c in data)):
            raise ValueError(f"{shown(data)} holds a character that is no text")
    elif isinstance(data, (list, dict)):
        if depth > DEEPEST:
            raise ValueError("its lists and mappings are nested too deeply")
        for one in data:
            _checked(one, depth + 1)
        for one in data.values() if isinstance(data, dict) else ():
            _checked(one, depth + 1)
    return data


@cache
def _loader() -> Any:
    import yaml

    class Plain(yaml.SafeLoader):
        """Without anchors, aliases, tags, equal keys, and numbers that are not decimal."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                mark = "an anchor or alias (& or *)" if event.anchor else "a tag (!)"
                fault = f"{mark} stands here; write it out"
                raise yaml.MarkedYAMLError(problem=fault, problem_mark=event.start_mark)
            node = super().compose_node(parent, index)
            if node is not None and node.tag in _NUMBERS and not _DECIMAL.fullmatch(node.value):
                fault = f"{shown(node.value)}: write numbers in decimal digits, or text in quotes"
                raise yaml.MarkedYAMLError(problem=fault, problem_mark=node.start_mark)
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            out = super().construct_mapping(node, deep)
            for i, key in enumerate(keys if len(out) < len(keys) else ()):
                if key in keys[:i]:
                    fault = f"the key {shown(key)} stands twice"
                    mark = node.value[i][0].start_mark
                    raise yaml.MarkedYAMLError(problem=fault, problem_mark=mark)
            return out

    return Plain
