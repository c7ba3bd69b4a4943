"""Lines below a run's table about the declared state of caches."""

from collections.abc import Iterator, Mapping

from picbench.output.summary import ArmSummary, CacheSummary, DecayWindow
from picbench.output.tables.arm_columns import NOTHING

_STATES = {
    "cold": "dropped before each group of requests, which share no more than what they have in "
    "common",
    "warm": "filled with every chunk before the first request was measured",
    "steady": "kept over a stream of different prompts",
}


def cache_lines(state: str | None, arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """The declared state, what was missed in a warm cache, and how gains decay in a steady one."""
    if state is None:
        return
    yield f"Cache {state}: {_STATES[state]}; verified from counters."
    for name, arm in arms.items():
        if arm.cache is None:
            continue
        if arm.cache.missed_requests:
            yield (
                f"{name}: {arm.cache.missed_requests} of {arm.requests} requests missed what had "
                f"been evicted ({_evicted(arm.cache)}): raise `kv_blocks`"
            )
        if arm.cache.decay:
            yield f"{name}: {_decay(arm.cache)}"


def _evicted(cache: CacheSummary) -> str:
    counts = (f"{count} {kind}" for kind, count in cache.evicted_blocks.items() if count)
    return f"{', '.join(counts)} blocks"


def _decay(cache: CacheSummary) -> str:
    """TTFT of windows, against full where there is such an arm, and what each found."""
    windows = cache.decay
    times = " ".join(_time(window) for window in windows)
    paired = any(window.ttft_vs_full for window in windows)
    what = "TTFT vs full" if paired else "TTFT p50 ms"
    requests = sum(window.requests for window in windows)
    shares = " ".join(_share(window) for window in windows)
    return (
        f"{what} over {len(windows)} windows of {requests} requests {times}; tokens found {shares}"
    )


def _time(window: DecayWindow) -> str:
    if window.ttft_vs_full is not None:
        return f"{window.ttft_vs_full.geomean:.2f}x"
    return NOTHING if window.ttft_ms is None else f"{window.ttft_ms.p50:.1f}"


def _share(window: DecayWindow) -> str:
    return f"{window.found_tokens / window.prompt_tokens:.0%}" if window.prompt_tokens else NOTHING
