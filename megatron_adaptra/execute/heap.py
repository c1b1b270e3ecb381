"""Python's garbage collector, kept from stopping the pipeline.

A full collection looks at every object of the process: a tenth of a second and more with torch and
Megatron loaded. Each rank does it at a time of its own, and all others wait for it. (Lin et al.,
Understanding Stragglers in Large Model Training Using What-if Analysis, arXiv 2505.05713, name it
among the causes of stragglers.) What is there once training runs will stay: it is set aside, and
collections look at the rest.
"""

from __future__ import annotations

import gc

_ITERATIONS = 2  # the optimizer makes its states in the first one


class FrozenHeap:
    """Sets aside what this process holds when two iterations are over.

    Nothing where the collector is off: other code sees to it, as Megatron's --manual-gc does.
    """

    def __init__(self) -> None:
        self._iterations, self._frozen = 0, False

    def iteration_done(self) -> None:
        """Count an iteration."""
        self._iterations += 1
        if self._iterations == _ITERATIONS and gc.isenabled():
            gc.collect()
            gc.freeze()
            self._frozen = True

    def close(self) -> None:
        """Let the collector look at everything again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
