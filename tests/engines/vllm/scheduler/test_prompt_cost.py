"""Where prompt tokens come from: by hand, for random plans, and in storms that are audited."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_contents import keys_of
from scheduler_storm import Storm
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from picbench.engines.algorithms import Registry
from picbench.engines.config import BLOCK_SIZE
from picbench.engines.planning.keys import Key
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import Segment
from picbench.engines.request import TokenCounts
from picbench.engines.vllm.scheduler.prompt_cost import Brought, PromptCost
from picbench.engines.vllm.settings import PicSettings

SPECS = (
    *("naive", "mepic", "mepic:blocks=2", "mepic:pad=paper", "mepic:select=question", "epic:k=16"),
    *("epic:k=4", "cacheblend", "cacheblend:select=first", "block-attention", "kvlink", "minipic"),
    *("prompt-cache", "naive:anchor=head"),
)


class Audit:
    """Notes what steps did, for whose sake, and what follows for each request that is scheduled.

    `compiled` and `loaded` are pages that were computed or loaded for requests that waited for
    them, `work` the tokens that were to be computed for that, `plain` hits of other requests.
    `found` has the scheduler's own counts.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.linker = scheduler, scheduler.linker
        self.compiled: dict[str, set[Key | None]] = {}
        self.plain = 0
        self._begun: dict[str, set[Key | None]] = {}
        self.loaded: dict[str, set[Key]] = {}
        self.work: Counter[str] = Counter()
        self.found: dict[str, TokenCounts] = {}
        self.expected: dict[str, TokenCounts] = {}
        self._pages: dict[tuple[str, Key], set[Key]] = {}
        self._schedule, scheduler.schedule = scheduler.schedule, self.schedule
        self._update, scheduler.update_from_output = scheduler.update_from_output, self.update

    def schedule(self, *args: Any) -> Any:
        waiting = self._waiting()
        output = self._schedule(*args)
        self._note_loads(output.kv_connector_metadata.commands.loads)
        fresh = {request.req_id for request in output.scheduled_new_reqs}
        begun = fresh | set(output.scheduled_cached_reqs.resumed_req_ids)
        for name, count in output.num_scheduled_tokens.items():
            if (job := self.linker._jobs.find(name)) is not None:
                owner, first = self._owner(job, waiting), self._computed(name) - count
                keys = job.plan.keys[first // BLOCK_SIZE :] if name in begun else ()
                self._begun.setdefault(name, set()).update(keys)
                rest = job.plan.kinds[first:] if name in begun else ()
                self.work[owner] += sum(kind != "pad" for kind in rest)
            elif name in fresh and self.linker.plan_of(name) is None:
                self.plain += self.scheduler.requests[name].prefill_stats.num_cached_tokens
        for name in self._begun:
            if (job := self.linker._jobs.find(name)) is not None:
                owner = self._owner(job, waiting)
                self.compiled.setdefault(owner, set()).update(self._begun[name])
        for name, count in output.num_scheduled_tokens.items():
            plan, request = self.linker.plan_of(name), self.scheduler.requests[name]
            if plan is None or self.linker.is_own(request) or name in self.expected:
                continue
            self.found[name] = self.linker.tokens_of(name)
            hits = (self._computed(name) - count) // BLOCK_SIZE
            self.expected[name] = self._expect(name, plan, keys_of(request, plan), hits)
        return output

    def update(self, output: Any, results: Any) -> Any:
        meta, waiting = results.kv_connector_output.kv_connector_worker_meta, self._waiting()
        for name, chunks in meta.results.served.items():
            job = self.linker._jobs.find(name)
            owner = self._owner(job, waiting) if job else name
            for key in chunks:
                self.loaded.setdefault(owner, set()).update(self._pages[name, key])
        return self._update(output, results)

    def _waiting(self) -> list[str]:
        planned = [name for name in self.scheduler.requests if self.linker.plan_of(name)]
        return [n for n in planned if not self.linker._jobs.find(n) and n not in self.expected]

    def _owner(self, job: Any, waiting: list[str]) -> str:
        """Who waits for a job's chunk, and is charged."""
        return str(job.charged_to) if job.charged_to in waiting else ""

    def _note_loads(self, loads: Any) -> None:
        for load in loads:
            job = self.linker._jobs.find(load.request_id)
            plan = self.linker.plan_of(load.request_id)
            canonicals = [job.canonical] if job else plan.canonicals
            for chunk in load.chunks:
                pages = next(c.pages for c in canonicals if c.key == chunk.key)
                names = {pages[i].name for i in chunk.pages}
                self._pages[load.request_id, chunk.key] = names

    def _computed(self, name: str) -> int:
        return int(self.scheduler.requests[name].num_computed_tokens)

    def _expect(self, name: str, plan: Plan, keys: list[Key], hits: int) -> TokenCounts:
        compiled, loaded = self.compiled.get(name, set()), self.loaded.get(name, set())
        found = Counter[str]()
        for slot, held in enumerate(plan.kinds):
            index = slot // BLOCK_SIZE
            if held == "pad":
                kind = "pad"
            elif index >= plan.canonical:
                kind = "prefix" if index < hits else "computed"
                found["linked"] += held == "linked" and index >= hits
            elif keys[index] in compiled:
                kind = "compiled"
            else:
                kind = "loaded" if keys[index] in loaded else "pool"
            found[kind] += 1
        return TokenCounts(
            prompt=plan.prompt_tokens,
            reused=found["pool"] + found["loaded"] + found["prefix"],
            compiled=found["compiled"],
            linked=found["linked"],
            padded=found["pad"],
            prefix=found["prefix"],
            compile_work=self.work[name],
            loaded={"far": found["loaded"]} if found["loaded"] else {},
        )


@pytest.mark.parametrize("seed", range(10))
def test_origins_are_what_steps_did_and_vllm_is_told_them(llama: Path, seed: int) -> None:
    storm = Storm(seed, llama, counts=True)
    audit = Audit(storm.scheduler)
    storm.run(60)
    assert len(audit.found) > 20
    for name, counts in audit.found.items():
        assert counts == audit.expected[name], name
        assert counts.reused is not None
        assert counts.reused + counts.compiled + (counts.computed or 0) == counts.prompt
    loaded = sum(counts.loaded.get("far", 0) for counts in audit.found.values())
    pooled = sum((counts.reused or 0) for counts in audit.found.values()) - loaded
    local, external = Counter[str](), Counter[Any]()
    for stats in storm.bench.counted:
        local["hits"] += stats.prefix_cache_stats.hits
        external.update(stats.connector_prefix_cache_stats.hits_by_source)
    assert external == Counter({CacheHitSource.EXTERNAL_UNSPECIFIED: loaded} if loaded else {})
    assert local["hits"] == pooled + audit.plain


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_parts_are_the_prompt_whatever_was_brought(data: st.DataObject) -> None:
    plan = data.draw(plans())
    named = sorted({page.copy_of or page.key or b"" for page in plan.pages[: plan.canonical]})
    brought = Brought()
    if named:
        brought.compiled.update(data.draw(st.lists(st.sampled_from(named))))
        for tier in ("host", "redis://a"):
            brought.load(data.draw(st.lists(st.sampled_from(named))), tier)
    hits = data.draw(st.integers(plan.canonical, len(plan.keys)))
    counts = PromptCost.of(plan, hits, brought).tokens
    parts = (counts.reused or 0, counts.compiled, counts.computed or 0)
    assert sum(parts) == counts.prompt and min(parts) >= 0
    assert sum(counts.loaded.values()) + (counts.prefix or 0) <= (counts.reused or 0)
    assert counts.linked <= (counts.computed or 0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Of a prompt of a few chunks, some of them twice, under any algorithm that reuses them."""
    algorithm = Registry().parse(draw(st.sampled_from(SPECS)))
    chunks = st.integers(1, 4).map(lambda n: tuple(range(100 * n, 100 * n + 13 * n)))
    layout = PicSettings(bos_token=1, pad_token=2, link_tokens=(3, 4, 5, 6, 7))
    segments = [Segment(tuple(range(draw(st.integers(0, 20)))))]
    segments += [Segment(chunk, chunk=True) for chunk in draw(st.lists(chunks, min_size=1))]
    segments.append(Segment(tuple(range(50, 51 + draw(st.integers(0, 40))))))
    given = [segment for segment in segments if segment.tokens]
    config = layout.layout(algorithm, None, BLOCK_SIZE)
    return lay_out(list(algorithm.arrange(given, config)), algorithm.plan_chunk, config)
