"""The covering selection meets every pair of values, and no row that is not possible."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from pairwise import covering, pairs, rows

AXES = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(
    lambda sizes: {f"axis {i}": tuple(range(size)) for i, size in enumerate(sizes)}
)


@given(AXES, st.sets(st.integers(0, 30)))
def test_every_possible_pair_is_in_a_row(
    axes: dict[str, tuple[int, ...]], impossible: set[int]
) -> None:
    def possible(row: dict[str, int]) -> bool:
        return sum(value * 5**i for i, value in enumerate(row.values())) % 31 not in impossible

    chosen = covering(axes, possible)
    every = list(rows(axes, possible))
    assert all(row in every for row in chosen)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, every))
    assert chosen == covering(axes, possible)
    assert len(chosen) <= len(every)


def test_few_rows_cover_many_values() -> None:
    axes = {name: tuple(range(5)) for name in "abcd"}
    chosen = covering(axes, lambda _: True)
    assert len(chosen) <= 40  # of 625; 25 at least
    for one, two in combinations(axes, 2):
        assert len({(row[one], row[two]) for row in chosen}) == 25
