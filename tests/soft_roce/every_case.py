"""All cases, in the order in which they run."""

from soft_roce import memory_cases, speed_cases, stranger_cases, verbs_cases
from soft_roce.cases import CASES, Size

__all__ = ["CASES", "Size", "memory_cases", "speed_cases", "stranger_cases", "verbs_cases"]
