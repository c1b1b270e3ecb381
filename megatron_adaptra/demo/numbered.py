"""Flags of the demo that name data-parallel ranks, or replicas, by number: `2:30ms`, `2:2x`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.emulate.rules import LONGEST_RULE

V = TypeVar("V")


class Numbered(NamedTuple):
    """A numbered flag takes values of a number, a colon, and a rest that fits `rule`.

    `flag`: its name. `rule`: a pattern with two groups. `syntax`: what is allowed, in words.
    `one`, `all_of_them`: what is numbered.
    """

    flag: str
    rule: re.Pattern[str]
    syntax: str
    one: str
    all_of_them: str

    def parsed(
        self, given: Sequence[str], replicas: int, value: Callable[[str], V]
    ) -> Iterator[tuple[str, int, V]]:
        """Give each text of `given`, its number, and the result of `value` for its rest.

        `replicas`: how many there are, from 0 on. Raises BadInput for a text of another form, a
        number that does not exist or was named before, and all that `value` raises.
        """
        seen: set[int] = set()
        for text in given:
            if "@" in text:
                when = "--from-iteration and --to-iteration have the period"
                raise BadInput(self.flag, text, f"leave out what begins with @: {when}")
            match = self.rule.fullmatch(text.strip()) if len(text) <= LONGEST_RULE else None
            if match is None:
                raise BadInput(self.flag, text, self.syntax)
            number, rest = int(match[1]), value(match[2])
            if replicas == 1:
                raise BadInput(self.flag, text, "it needs several replicas, --data-parallel 4")
            if number >= replicas:
                allowed = f"no such {self.one}; {self.all_of_them} are 0 to {replicas - 1}"
                raise BadInput(self.flag, text, allowed)
            if number in seen:
                once = f"it has to name each {self.one} only once"
                raise BadInput(self.flag, ",".join(given), once)
            seen.add(number)
            yield text, number, rest
