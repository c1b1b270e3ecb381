"""What the known schedules take on equal stages and healthy links, in seconds.

Each is the work of one device, m (f + b), and its bubble, the time it idles. Times are those of a
device, over all its chunks; b = i + w, the two halves of a backward. GPipe and 1F1B share one form,
`one_f_one_b_seconds`; it is exact for any number of microbatches and any times.
"""

from __future__ import annotations


def one_f_one_b_seconds(stages: int, microbatches: int, forward: float, backward: float) -> float:
    """1F1B on equal stages and healthy links: (m + p - 1)(f + b).

    `stages` p, `microbatches` m, `forward` f and `backward` b seconds of one microbatch on a stage.
    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (SC 2021), section 2.2.
    """
    return (microbatches + stages - 1) * (forward + backward)


gpipe_seconds = one_f_one_b_seconds


def interleaved_seconds(
    stages: int, microbatches: int, forward: float, backward: float, chunks: int
) -> float:
    """The bubble of 1F1B, divided by the chunks per device.

    Exact where interleaving runs at all: microbatches in multiples of the stages. Source: Narayanan
    et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    (SC 2021), section 2.2.
    """
    work = microbatches * (forward + backward)
    return work + (stages - 1) * (forward + backward) / chunks


def zb_h1_seconds(
    stages: int, microbatches: int, forward: float, backward_input: float, backward_weight: float
) -> float:
    """ZB-H1, with a bubble of (p - 1)(f + i - w).

    Exact where w <= f, w <= i and microbatches >= stages: a longer W is in the way of the next F
    or I. Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2.3, table 1.
    """
    both = forward + backward_input
    return microbatches * (both + backward_weight) + (stages - 1) * (both - backward_weight)


def zb_h2_seconds(
    stages: int, microbatches: int, forward: float, backward_input: float, backward_weight: float
) -> float:
    """ZB-H2 as one device sees it (`Timeline.iteration`), with a bubble of (p - 1)(f + i - 2w).

    Exact where w <= f, 2w <= f + i and microbatches >= 2 stages - 1. Deferred stages start and end
    later, into the next iteration; source and table as for ZB-H1.
    """
    both = forward + backward_input
    return microbatches * (both + backward_weight) + (stages - 1) * (both - 2 * backward_weight)
