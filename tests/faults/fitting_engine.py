"""The same for the engine's C++: a function by its qualified name, code compared by its tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path("csrc") / "rdma_offload"
_LEFT_OUT = re.compile(r"\s+|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])+\'|\d(?:[eE][+-]|[\w.])*|\w+|::|->|\S', re.DOTALL
)
_CLOSES = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Token:
    """`begin`, `end`: where it stands in its file's text."""

    text: str
    begin: int
    end: int


def tokens(code: str) -> list[Token]:
    """What a compiler reads of `code`: neither comments nor spaces."""
    found, at = [], 0
    while at < len(code):
        if left_out := _LEFT_OUT.match(code, at):
            at = left_out.end()
        elif token := _TOKEN.match(code, at):
            found.append(Token(token.group(), at, at := token.end()))
    return found


def definitions(name: str, code: list[Token]) -> list[list[Token]]:
    """Each definition of the function `name` in a file: its list of initialisers and its body."""
    head = [*texts(tokens(name)), "("]
    found = []
    for i in places(head, code):
        begin = _after(code, i + len(head) - 1)
        if (body := _body(code, begin)) is not None:
            found.append(code[begin : _after(code, body)])
    return found


def places(wanted: list[str], code: list[Token]) -> list[int]:
    """Where `wanted` begins in `code`; no two of them overlap."""
    found, at, all_texts = [], 0, texts(code)
    while wanted and at + len(wanted) <= len(code):
        if all_texts[at : at + len(wanted)] == wanted:
            found.append(at)
            at += len(wanted)
        else:
            at += 1
    return found


def texts(code: list[Token]) -> list[str]:
    return [token.text for token in code]


def _body(code: list[Token], at: int) -> int | None:
    """Where the brace of a body is, after the parameters; None for a call or a declaration."""
    initialisers = False
    while at < len(code):
        text = code[at].text
        if text == "{" and not (initialisers and re.match(r"\w|>", code[at - 1].text)):
            return at
        if text in _CLOSES:
            if not initialisers:  # a call inside of another one
                return None
            at = _after(code, at)
            continue
        initialisers |= text == ":"
        if not (initialisers or re.match(r"const|noexcept|override", text)):
            return None
        at += 1
    return None


def _after(code: list[Token], at: int) -> int:
    """The place after what closes the bracket at `at`."""
    opening, depth = code[at].text, 0
    for i in range(at, len(code)):
        depth += (code[i].text == opening) - (code[i].text == _CLOSES[opening])
        if depth == 0:
            return i + 1
    return len(code)
