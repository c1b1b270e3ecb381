"""What a part comes to: one line, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_adaptra.cli.output import Table

OK, FAIL, NOT_RUN = "OK", "FAIL", "NOT RUN"
MOST = 3  # things that are wrong, on the line


@dataclass
class Result:
    """`figures`: measured, of a part that passed; `wrong`: what failed; `left_out`: what this
    machine does not allow; `why_not`: it did not run; `seconds`: what it took."""

    part: str
    figures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    why_not: str = ""
    seconds: float = 0.0

    @property
    def word(self) -> str:
        if self.wrong:
            return FAIL
        return NOT_RUN if self.why_not else OK

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
        if self.left_out:
            text += f" (left out: {'; '.join(self.left_out)})"
        return " ".join(text.split())

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        tables = [table._asdict() for table in self.tables]
        return {**vars(self), "word": self.word, "line": self.line, "tables": tables}

    def check(self, well: bool, otherwise: str) -> None:
        """Note what is wrong, unless all is `well`."""
        if not well:
            self.wrong.append(otherwise)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.tables.append(Table(title, tuple(columns), [list(row) for row in rows]))


def not_run(part: str, why: str) -> Result:
    return Result(part, why_not=why)


def many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"
