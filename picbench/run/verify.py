"""Checks that a batch measured what it was meant to measure."""

from picbench.arms.arm import Arm
from picbench.arms.messages import Failure, ServedReply
from picbench.engines.algorithms import Reuse
from picbench.errors import InvalidRun
from picbench.run.protocol import ArmBatch


def verify(batch: ArmBatch, arm: Arm, *, warm: bool = False) -> None:
    """Raise InvalidRun where an engine ran other tokens, or reused what its arm may not or must.

    Arms are comparable only on identical token ids, and an arm that reuses nothing is the
    baseline only if its cache never hit. A `warm` batch, before which chunks were preloaded, has
    to hit in arms that reuse chunks. Servers elsewhere count the prompt's tokens when they reply;
    what they reuse is not known.
    """
    if warm and arm.reuse is Reuse.CHUNKS:
        _verify_warm(batch, arm)
    for sample, outcome in zip(batch.samples, batch.result.outcomes, strict=True):
        if isinstance(outcome, Failure | ServedReply):
            continue
        where = f"arm {arm.name}, sample {sample.id}"
        if outcome.prompt_tokens != sample.tokens:
            raise InvalidRun(
                f"{where}: the engine ran other token ids than the workload has",
                hint="report this with the run directory",
            )
        if arm.reuse is Reuse.NOTHING and outcome.counts.reused:
            raise InvalidRun(
                f"{where}: {outcome.counts.reused} tokens came from a cache that must be off",
                hint="look for a VLLM_* variable or configuration that turns caching on",
            )


def _verify_warm(batch: ArmBatch, arm: Arm) -> None:
    results = [o for o in batch.result.outcomes if not isinstance(o, Failure | ServedReply)]
    if results and not any(result.counts.reused for result in results):
        raise InvalidRun(
            f"arm {arm.name}: chunks were preloaded, and round {batch.round} reused none",
            hint="raise `kv_blocks`: the pool may be too small to keep them",
        )
