"""Requests over few chunks and few blocks, for a scheduler without an engine."""

import random
from pathlib import Path
from typing import Any

from kv_contents import Tiers, Workers
from scheduler_bench import bench
from vllm.v1.request import RequestStatus

from picbench.engines.vllm.scheduler.block_ledger import BlockLedger

ALGORITHMS = [
    *["naive", "mepic", "epic:k=16", "epic:k=4"],
    *["epic:k=16:copy=shared", "naive:anchor=head", "cacheblend:r=0.15", "prefix", "full"],
]


class Storm:
    """Requests over few chunks and few blocks, ended and started over at random."""

    def __init__(self, seed: int, model: Path, **more: Any) -> None:
        self.dice = random.Random(seed)
        ahead, tiers = self.dice.random() < 0.5, self.dice.choice(["", "host:1MiB", "disk:/x:1MiB"])
        self.bench = bench(
            model,
            blocks=self.dice.choice([24, 30, 40]),
            batch_tokens=self.dice.choice([24, 64, 200]),
            ahead=ahead,
            policy=self.dice.choice(["fcfs", "priority"]),
            tiers=tiers,
            compile_order=self.dice.choice(["head", "batch", "isps"]),
            **more,
        )
        self.scheduler: Any = self.bench.scheduler
        self.free = self.bench.free
        self.ledger = BlockLedger(self.scheduler)
        self.workers = Workers(self.scheduler, Tiers(6 * bool(tiers), self.dice))
        begin = tuple(range(100, 116))
        chunks = [tuple(range(200 * n, 200 * n + self.dice.randint(1, 60))) for n in range(1, 8)]
        # Some begin alike.
        self.chunks = [*chunks, *((*begin, *chunk[:20]) for chunk in chunks[:3])]

    def run(self, requests: int) -> dict[str, Any]:
        scheduler, number, answers = self.scheduler, 0, []
        steps = 0
        while number < requests or scheduler.has_requests():
            steps += 1
            assert steps < 100 * requests, [*scheduler.requests]
            while number < requests and len(scheduler.requests) < 12:
                self._submit(number)
                number += 1
            self._check_lacking()
            step = self.bench.schedule()
            answers.append(self.workers.run(step))
            self.workers.check(step)
            if len(self.bench._steps) > self.bench.ahead:
                results, loaded, failed = answers.pop(0)
                self.bench.finish(results, loaded=loaded, failed=failed)
            self._interfere()
        for results, loaded, failed in answers:
            self.bench.finish(results, loaded=loaded, failed=failed)
        return self.bench.ended

    def _check_lacking(self) -> None:
        """What vLLM counts, and the block of a token that is sampled ahead."""
        for request in self.scheduler.running:
            known = self.scheduler._request_remaining_blocks(request)
            ahead = request.num_output_placeholders > 0
            assert known <= self.scheduler._lacks(request) <= known + ahead

    def _submit(self, number: int) -> None:
        chunks = self.dice.choices(self.chunks, k=self.dice.randint(1, 4))
        self.bench.submit(
            str(number),
            *chunks,
            question=tuple(range(3, 4 + self.dice.randint(0, 25))),
            algorithm=self.dice.choice(ALGORITHMS),
            max_tokens=self.dice.choice([1, 2, 20, 60]),
            priority=self.dice.randint(0, 2),
        )

    def _interfere(self) -> None:
        if self.scheduler.requests and self.dice.random() < 0.05:
            name = self.dice.choice(sorted(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if self.dice.random() < 0.01:
            reset(self.scheduler)


def reset(scheduler: Any) -> None:
    """Drop the cache while requests run; afterwards nothing is found in it."""
    assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    pool = scheduler.kv_cache_manager.block_pool
    assert len(pool.cached_block_hash_to_block) == 0
    assert not any(block.block_hash for block in pool.blocks)
