"""From vLLM's output to a result."""

from typing import TYPE_CHECKING, Any

from picbench.engines.config import BLOCK_SIZE
from picbench.engines.prepared_request import PreparedRequest
from picbench.engines.request import Hits, Result, Timings, TokenCounts
from picbench.engines.tokenizer import ModelTokenizer
from picbench.engines.vllm.settings import REJECTED
from picbench.errors import EngineError

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from picbench.engines.vllm.scheduler.linker import PromptCost


def make_result(
    prepared: PreparedRequest,
    output: "RequestOutput",
    cost: "PromptCost | None",
    late: float,
    tokenizer: ModelTokenizer,
) -> Result:
    """The result of a request that was submitted `late` seconds after it was due.

    `cost` is the linker's account of a request with chunks; without one, vLLM's counts of cached
    tokens are used. Raises EngineError if vLLM reported no timings.
    """
    completion = output.outputs[0]
    cached = output.num_cached_tokens or 0
    return Result(
        text=tokenizer.decode(completion.token_ids),
        tokens=tuple(completion.token_ids),
        prompt_tokens=tuple(prepared.prompt_token_ids),
        timings=_timings(output, len(completion.token_ids), late),
        counts=cost.tokens if cost else TokenCounts(len(prepared.prompt_token_ids), reused=cached),
        hits=cost.hits if cost else Hits(prefix=cached // BLOCK_SIZE),
        finish_reason=_finish_reason(completion),
        logprobs=_logprobs(completion.logprobs),
    )


def _timings(output: "RequestOutput", generated: int, late: float) -> Timings:
    stats: Any = output.metrics
    if stats is None:
        raise EngineError("vLLM reported no timings")
    decode = stats.last_token_ts - stats.first_token_ts
    return Timings(
        ttft=stats.first_token_latency,
        prefill=stats.first_token_ts - stats.scheduled_ts,
        tpot=decode / (generated - 1) if generated > 1 else None,
        e2e=stats.first_token_latency + decode,
        late=late,
    )


def _finish_reason(completion: Any) -> str | None:
    if completion.stop_reason == REJECTED:
        return "rejected"
    reason: str | None = completion.finish_reason
    return reason


def _logprobs(steps: Any) -> tuple[dict[int, float], ...] | None:
    if steps is None:
        return None
    return tuple({token: entry.logprob for token, entry in step.items()} for step in steps)
