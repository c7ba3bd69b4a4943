"""Lines below a run's table about what servers elsewhere counted by themselves."""

from collections.abc import Iterator, Mapping

from picbench.arms.messages import ServerCounts
from picbench.output.summary import ArmSummary


def server_lines(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """A line for each server that tells something; of what it does not tell, nothing."""
    for name, arm in arms.items():
        if arm.counted is None:
            continue
        parts = list(_parts(arm, arm.counted))
        if parts:
            yield f"{name}: by its own counters {'; '.join(parts)}"


def _parts(arm: ArmSummary, counted: ServerCounts) -> Iterator[str]:
    share = counted.reused_share
    if share is not None:
        yield f"{share:.1%} of prompt tokens came from its caches"
    if counted.preemptions:
        yield f"{counted.preemptions:,} preemptions"
    if counted.peak_kv_usage is not None:
        yield f"at most {counted.peak_kv_usage:.0%} of its KV memory was seen in use"
    # Failed requests may be counted or not.
    if counted.prompt_tokens not in (None, arm.tokens.prompt) and not arm.failed:
        yield (
            f"{counted.prompt_tokens:,} prompt tokens where {arm.tokens.prompt:,} were sent: it "
            "serves others, too, and its counters are theirs as well"
        )
