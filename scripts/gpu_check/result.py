"""What a part comes to: one line, and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_adaptra.cli.output import Table

OK, FAIL, NOT_RUN, CUT_OFF = "OK", "FAIL", "NOT RUN", "CUT OFF"
MOST = 3  # things that are wrong, on the line


@dataclass
class Result:
    """A result holds what a part has found so far.

    `figures`: measured; `wrong`: what failed; `left_out`: what this machine does not allow;
    `why_not`: why the part did not run; `seconds`: what it took; `ended`: it came to its end.
    `write`: called by `so_far`, since a machine that is lent may be taken away in mid-part.
    """

    part: str
    figures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    why_not: str = ""
    seconds: float = 0.0
    ended: bool = False
    write: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def word(self) -> str:
        if self.wrong:
            return FAIL
        if self.why_not:
            return NOT_RUN
        return OK if self.ended else CUT_OFF

    def so_far(self) -> None:
        """Write what has been found, of which the part is not the end."""
        if self.write is not None:
            self.write()

    @property
    def line(self) -> str:
        """One line."""
        if self.word == NOT_RUN:
            text = f"{self.part}: {NOT_RUN}: {self.why_not}"
        else:
            shown = self.wrong[:MOST] if self.wrong else self.figures
            text = f"{self.part}: {self.word}, {'; '.join(shown)}"
            if len(self.wrong) > MOST:
                text += f"; and {len(self.wrong) - MOST} more"
            if self.wrong and self.figures:
                text += f" (found before: {'; '.join(self.figures)})"
        if self.left_out:
            text += f" (left out: {'; '.join(self.left_out)})"
        return " ".join(text.split())

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "write"}
        tables = [table._asdict() for table in self.tables]
        return {**own, "word": self.word, "line": self.line, "tables": tables}

    def check(self, well: bool, otherwise: str) -> None:
        """Note what is wrong, unless all is `well`."""
        if not well:
            self.wrong.append(otherwise)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.tables.append(Table(title, tuple(columns), [list(row) for row in rows]))
        self.so_far()


def many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"
