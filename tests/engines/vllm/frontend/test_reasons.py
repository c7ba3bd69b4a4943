"""What clients of vLLM's server are told of a request that ended with an error, and when."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from core_requests import core_request
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from picbench.engines.vllm.frontend.patches import _told, check_output, tell_reasons
from picbench.engines.vllm.settings import REJECTED


def ended(finish_reason: str, stop_reason: Any) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)]
    )


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (REJECTED, 503, "ServiceUnavailableError"),
        ("picbench failed to plan a request", 500, "InternalServerError"),
    ],
)
def test_a_reason_becomes_an_error_of_the_server(reason, status, kind):
    """Pressure passes, so a client may send the request again."""
    with pytest.raises(GenerationError) as raised:
        check_output(ended("error", reason))
    error = create_error_response(raised.value).error
    assert (error.code, error.type, error.message) == (status, kind, reason)


@pytest.mark.parametrize("output", [ended("error", None), ended("stop", "a stop string")])
def test_what_is_no_fault_is_left_to_vllm(output):
    check_output(output)


def test_an_error_closes_what_it_was_generated_by():
    closed = list[bool]()

    async def upstream(self: Any) -> AsyncIterator[Any]:
        try:
            yield ended("error", "a reason")
            yield ended("length", None)
        finally:
            closed.append(True)

    async def collect() -> list[bool]:
        with pytest.raises(GenerationError, match="a reason"):
            [output async for output in _told(upstream, None)]
        return list(closed)

    assert asyncio.run(collect()) == [True]


class TestSamples:
    """Of two samples that are not streamed, the first one ends with an error."""

    @pytest.fixture
    def processor(self) -> OutputProcessor:
        tell_reasons()
        return OutputProcessor(None, log_stats=False)

    @pytest.fixture
    def queue(self, processor: OutputProcessor) -> RequestOutputCollector:
        params = SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
        request = core_request("both", params)
        parent = ParentRequest(request)
        queue = RequestOutputCollector(params.output_kind, "both")
        for index in range(2):
            request.request_id, request.sampling_params = parent.get_child_info(index)
            processor.add_request(request, None, parent, index, queue)
        return queue

    def end(self, processor: OutputProcessor, name: str, reason: FinishReason, why: Any) -> None:
        output = EngineCoreOutput(
            request_id=name, new_token_ids=[], finish_reason=reason, stop_reason=why
        )
        processor.process_outputs([output])

    def test_a_fault_does_not_wait_for_the_other(self, processor, queue):
        self.end(processor, "0_both", FinishReason.ERROR, "a reason")
        told = queue.get_nowait()
        with pytest.raises(GenerationError, match="a reason"):
            check_output(told)
        assert processor.abort_requests(["both"], internal=True) == ["1_both"]
        assert not processor.has_unfinished_requests()
        assert not processor.parent_requests

    def test_a_fault_of_the_last_is_told_with_the_other(self, processor, queue):
        self.end(processor, "1_both", FinishReason.LENGTH, None)
        assert queue.get_nowait() is None
        self.end(processor, "0_both", FinishReason.ERROR, "a reason")
        told = queue.get_nowait()
        assert told.finished
        with pytest.raises(GenerationError, match="a reason"):
            check_output(told)

    def test_other_samples_are_told_together(self, processor, queue):
        self.end(processor, "0_both", FinishReason.LENGTH, None)
        assert queue.get_nowait() is None
        self.end(processor, "1_both", FinishReason.STOP, 7)
        assert [one.finish_reason for one in queue.get_nowait().outputs] == ["length", "stop"]
