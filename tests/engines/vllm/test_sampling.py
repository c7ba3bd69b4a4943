"""Sampling from planned requests, against stock vLLM on the same prompt.

A chunk that begins the prompt is compiled as stock computes it, with nothing else in view, and a
chunk that is linked as a whole is not reused. So two kinds of plan have stock's answer: one with a
first chunk only, and one that links all others. Both have hidden pads.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from small_engine import small_config
from vllm import SamplingParams

from picbench.engines.engine import Engine
from picbench.engines.vllm.device import CPU
from picbench.engines.vllm.launch import _start
from picbench.engines.vllm.settings import PicSettings, engine_arguments

WHOLE = {"spans": [[0, 20], [20, 60]], "algorithm": "epic:k=64"}
FIRST = {"spans": [[0, 40]], "algorithm": "naive"}
MANY = {"spans": [[at, at + 60] for at in range(0, 300, 60)], "algorithm": "epic:k=64"}
PLANS = pytest.mark.parametrize("pic", [WHOLE, FIRST], ids=["whole", "first"])

#: Of the tiny Llama's vocabulary; prompts are drawn without it, and visible pads have it.
PAD = 0


@pytest.fixture(scope="module")
def stock(llama) -> Iterator[Engine]:
    with Engine(small_config(llama, 300, 1024, stock=True, algorithm="prefix")) as engine:
        yield engine


def ask(engine: Any, prompts: list[Any], **params: Any) -> dict[str, Any]:
    """Outputs by request id, in the order in which they finish; engines are vLLM's or ours."""
    llm = engine._running.engine if isinstance(engine, Engine) else engine
    for index, prompt in enumerate(prompts):
        tokens, pic, priority = (*prompt, None, 0)[:3] if isinstance(prompt, tuple) else prompt
        extra = {"pic": pic} if pic else None
        sampling = SamplingParams(detokenize=False, extra_args=extra, **params)
        llm.add_request(str(index), {"prompt_token_ids": list(tokens)}, sampling, priority=priority)
    done: dict[str, Any] = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step() if output.finished}
    return done


def one(engine: Engine, tokens: Any, pic: Mapping[str, Any] | None = None, **params: Any) -> Any:
    return ask(engine, [(tokens, pic)], **params)["0"]


PARAMETERS = {
    "greedy": {"temperature": 0, "logprobs": 5},
    "penalties": {
        "temperature": 0,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
    },
    "seed": {"seed": 7, "temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "several": {"n": 3, "seed": 11, "temperature": 1.5},
    "tokens": {"temperature": 0, "logit_bias": {9: 60.0}, "min_tokens": 9, "stop_token_ids": [9]},
    "logprobs of tokens": {"temperature": 0, "logprob_token_ids": [5, 6, 7]},
}


@PLANS
@pytest.mark.parametrize("params", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_planned_requests_sample_as_stock_does(engine, stock, draw, pic, params):
    prompt = draw(70, 31)
    ours = one(engine, prompt, pic, max_tokens=12, **params)
    theirs = one(stock, prompt, max_tokens=12, **params)
    assert ours.prompt_token_ids == theirs.prompt_token_ids == list(prompt)
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert list(mine.token_ids) == list(other.token_ids)
        assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
        for got, wanted in zip(mine.logprobs or (), other.logprobs or (), strict=True):
            values = {token: entry.logprob for token, entry in wanted.items()}
            assert {token: entry.logprob for token, entry in got.items()} == pytest.approx(
                values, abs=1e-3
            )


@PLANS
def test_a_stop_token_ends_planned_requests_where_it_ends_stock(engine, stock, draw, pic):
    prompt = draw(70, 32)
    fourth = one(stock, prompt, max_tokens=8, temperature=0).outputs[0].token_ids[3]
    params = {"max_tokens": 8, "temperature": 0, "stop_token_ids": [fourth]}
    ours, theirs = one(engine, prompt, pic, **params), one(stock, prompt, **params)
    assert list(ours.outputs[0].token_ids) == list(theirs.outputs[0].token_ids)
    assert ours.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("pic", [None, MANY], ids=["plain", "planned"])
def test_seeded_requests_survive_prompts_of_several_steps(engine, stock, draw, pic):
    """Generators on a CPU cannot be wound back as vLLM does after every part of a prompt."""
    prompt = draw(310, 33)
    params = {"seed": 5, "temperature": 1.5, "max_tokens": 6}
    ours, theirs = one(engine, prompt, pic, **params), one(stock, prompt, **params)
    assert list(ours.outputs[0].token_ids) == list(theirs.outputs[0].token_ids)


class TestVisiblePads:
    """Penalties count what the user sent: ``pad=paper`` puts pads into the model's view only."""

    PIC: Mapping[str, Any] = {"spans": [[0, 37]], "algorithm": "mepic:pad=paper"}
    #: Puts the pad far ahead of all others, unless it is penalized.
    FORCED: Mapping[str, Any] = {
        "logit_bias": {PAD: 60.0},
        "repetition_penalty": 1000.0,
        "temperature": 0,
        "max_tokens": 2,
    }

    def test_pads_are_not_penalized(self, engine, draw):
        tokens = one(engine, draw(60, 34), self.PIC, **self.FORCED).outputs[0].token_ids
        assert tokens[0] == PAD
        assert tokens[1] != PAD, "generated tokens count"

    def test_the_same_token_of_the_user_is(self, engine, draw):
        prompt = (*draw(50, 35), PAD, *draw(9, 36))
        assert one(engine, prompt, self.PIC, **self.FORCED).outputs[0].token_ids[0] != PAD

    def test_other_requests_of_the_batch_keep_their_prompts(self, engine, draw):
        prompts = [
            (draw(60, 34), self.PIC),
            ((*draw(20, 37), PAD),),
            (draw(30, 38),),
            ((*draw(30, 39), PAD, *draw(8, 40)), self.PIC),
        ]
        done = ask(engine, prompts, **self.FORCED)
        first = [done[str(i)].outputs[0].token_ids[0] == PAD for i in range(len(prompts))]
        assert first == [True, False, True, False]


class TestPriority:
    """Requests with chunks are served in the order of priorities, their compiles too."""

    PRIORITIES = (5, 0, 3, 0, 5, 1)

    def engine(self, llama: Any, blocks: int, **arguments: Any) -> Any:
        common = {
            "model": str(llama),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 512,
            "kv_cache_memory_bytes": CPU.pool_bytes,
            "num_gpu_blocks_override": blocks,
            "scheduling_policy": "priority",
            "disable_log_stats": False,
        }
        return _start(common | arguments, {})

    def test_the_order_is_stocks(self, llama, draw):
        prompts = [(draw(70, 41 + i), WHOLE, p) for i, p in enumerate(self.PRIORITIES)]
        plain = [(tokens, None, priority) for tokens, _, priority in prompts]
        params = {"max_tokens": 4, "temperature": 0}
        stock = self.engine(llama, 100, block_size=32, max_num_seqs=1, async_scheduling=False)
        theirs = ask(stock, plain, **params)
        stock.engine_core.shutdown()
        ours = self.engine(llama, 200, max_num_seqs=1, **engine_arguments(PicSettings(tiers="")))
        # The order also holds if chunks have to be compiled first.
        shared = [(t, {"spans": [[0, 40]], "algorithm": "mepic"}, p) for t, _, p in prompts]
        for asked in (prompts, shared):
            done = ask(ours, asked, **params)
            assert list(done) == list(theirs) == ["1", "3", "5", "2", "0", "4"]
        first = ask(ours, prompts, **params)
        ours.engine_core.shutdown()
        for name, output in theirs.items():
            assert list(first[name].outputs[0].token_ids) == list(output.outputs[0].token_ids)

    def test_chunks_are_compiled_in_the_order_of_priorities(self, llama, draw):
        """Right before the request that needs them: neither earlier nor after less urgent ones."""
        engine = self.engine(llama, 200, max_num_seqs=1, **engine_arguments(PicSettings(tiers="")))
        started = self.note(engine)
        for index, priority in enumerate((*self.PRIORITIES, -1)):
            self.add(engine, str(index), draw(70, 60 + index), priority, arrival=index)
        self.finish(engine)
        order = [name for index in "6135204" for name in (f"chunk of {index}", index)]
        assert started == order

    def test_a_chunk_moves_ahead_with_a_request_that_arrived_earlier(self, llama, draw):
        """Its compile is queued for one request, then needed first by another one."""
        engine = self.engine(llama, 200, max_num_seqs=1, **engine_arguments(PicSettings(tiers="")))
        started = self.note(engine)
        tokens = draw(70, 70)
        self.add(engine, "running", draw(20, 71), 0, arrival=0, spans=[])
        engine.step()
        self.add(engine, "late", tokens, 0, arrival=9)
        engine.step()
        self.add(engine, "early", tokens, 0, arrival=3)
        self.add(engine, "plain", draw(20, 72), 0, arrival=6, spans=[])
        self.finish(engine)
        assert started == ["running", "chunk of early", "early", "plain", "late"]

    @staticmethod
    def note(engine: Any) -> list[str]:
        """The requests that the engine starts from now on, and for which ones chunks are."""
        scheduler, started = engine.engine_core.engine_core.scheduler, list[str]()
        schedule = scheduler.schedule

        def noting(*args: Any) -> Any:
            output = schedule(*args)
            for request in output.scheduled_new_reqs:
                job = scheduler.jobs.find(request.req_id)
                # vLLM appends a number of its own to the names.
                name = (job.ahead_of if job else request.req_id).rpartition("-")[0]
                started.append(f"chunk of {name}" if job else name)
            return output

        scheduler.schedule = noting
        return started

    @staticmethod
    def add(
        engine: Any, name: str, tokens: Any, priority: int, *, arrival: int, spans: Any = ((0, 40),)
    ) -> None:
        pic = {"pic": {"spans": spans, "algorithm": "mepic"}} if spans else None
        params = SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True, extra_args=pic)
        prompt = {"prompt_token_ids": list(tokens)}
        engine.add_request(name, prompt, params, arrival_time=float(arrival), priority=priority)

    @staticmethod
    def finish(engine: Any) -> None:
        while engine.has_unfinished_requests():
            engine.step()
        engine.engine_core.shutdown()

    def test_pressure_changes_no_answer(self, llama, draw):
        """In a pool for two requests at a time, others are preempted, and all are answered."""
        spans = {"spans": [[0, 60], [60, 140]], "algorithm": "mepic"}
        shared = draw(60, 50)
        prompts = [
            ((*shared, *draw(95, 51 + i)), spans, priority)
            for i, priority in enumerate(self.PRIORITIES * 2)
        ]
        answers = []
        for blocks in (400, 34):
            engine = self.engine(llama, blocks, **engine_arguments(PicSettings(tiers="")))
            done = ask(engine, prompts, max_tokens=40, temperature=0, ignore_eos=True)
            scheduler = engine.engine_core.engine_core.scheduler
            assert scheduler.linker.idle
            assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1
            answers.append({name: list(o.outputs[0].token_ids) for name, o in done.items()})
            engine.engine_core.shutdown()
        assert answers[0] == answers[1]
