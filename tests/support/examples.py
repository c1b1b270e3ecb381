"""How many examples hypothesis draws where one takes long: a quarter of them with --quick."""

from __future__ import annotations

from hypothesis import settings

WHOLE = 60  # the profile's, where nothing else is asked for


def examples(most: int) -> settings:
    """At most `most`, of which --quick draws a quarter."""
    return settings(max_examples=most if settings.default.max_examples >= WHOLE else most // 4)
