"""When requests arrive."""

from itertools import accumulate
from random import Random

from picbench.workloads.traffic.settings import Process


def arrival_times(rng: Random, count: int, rate: float, process: Process) -> tuple[float, ...]:
    """Arrival times in seconds from the start, in order, `rate` a second on average.

    ``poisson`` draws independent exponential gaps, ``uniform`` spaces arrivals evenly from 0 on.
    """
    if process == "uniform":
        return tuple(number / rate for number in range(count))
    return tuple(accumulate(rng.expovariate(rate) for _ in range(count)))
