"""What became of prompts, told with the first output of the requests that ask for it.

A report goes to the caller as vLLM's `kv_transfer_params` of an output
(vllm/v1/engine/__init__.py, EngineCoreOutput). The first output has it, and not the last one as of
other connectors: of a request that ends at a stop string the engine core does not know the last.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.planning.keys import Key
from picbench.engines.request import TokenCounts
from picbench.engines.vllm.frontend.request_args import ARGS, RequestArgs, parsed_args
from picbench.engines.vllm.scheduler.linker import Link, Linker
from picbench.engines.vllm.scheduler.pool import Pool

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request


class UsageReports:
    """Reports of the requests of one scheduler; `always` also of those that do not ask for one.

    A report has the prompt's tokens by kind, and for each chunk its span and its state: `hit`,
    `loaded:TIER`, `compiled`, with the reason why it was missing, or `text`, where none of its KV
    was reused. `totals` counts all requests, as `engines.vllm.metrics.SERIES` names things.
    """

    def __init__(self, linker: Linker, store: ChunkStore, *, always: bool) -> None:
        self._linker = linker
        self._store = store
        self._always = always
        self._reports: dict[str, dict[str, Any]] = {}
        self._pins: dict[str, tuple[Key, ...]] = {}
        self.totals = Counter({"refused_requests|pressure": 0, "refused_requests|fault": 0})
        for kind in ("chunks", "plain"):
            self._count(kind, TokenCounts(), requests=0)

    def on_scheduled(self, request: "Request", hit_tokens: int) -> None:
        """A user's request was scheduled for the first time, with so many tokens in the cache."""
        args = parsed_args(request)
        asks = args.usage if args else None
        link = self._linker.link_of(request.request_id)
        if link and link.cost is None:  # It could not be counted.
            return
        plain = TokenCounts.plain(request.num_prompt_tokens, hit_tokens)
        counts = link.cost.tokens if link and link.cost else plain
        self._count("chunks" if link else "plain", counts)
        if self._always if asks is None else asks:
            report = {**_tokens(counts), "chunks": list(self._chunks(args, link))}
            self._reports[request.request_id] = report
        if args and link and args.pin:
            self._pins[request.request_id] = link.keys

    def values(self, pool: Pool) -> dict[str, int]:
        """The totals, and the pool's blocks: a chunk's or a prefix's are in use or idle."""
        store, totals = self._store, dict(self.totals)
        totals |= {f"compiled_chunks|{reason}": n for reason, n in store.compiles.items()}
        blocks = {"usable": pool.usable, "used": pool.usable - pool.available}
        blocks |= {"chunk": store.pages, "prefix": pool.cached - store.pages}
        blocks["pinned"] = len(store.pinned_blocks())
        return totals | {f"kv_blocks|{kind}": count for kind, count in blocks.items()}

    def attach(self, outputs: "Iterable[EngineCoreOutputs]") -> None:
        """Add the reports to the outputs of their requests."""
        for output in (output for client in outputs if self._reports for output in client.outputs):
            report = self._reports.pop(output.request_id, None)
            if report and (keys := self._pins.pop(output.request_id, ())):
                report["pinned"] = all(map(self._store.pin, keys))
            if report is not None:
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), ARGS: report}

    def drop(self, requests: "Iterable[Request]") -> None:
        """Forget the reports of requests that ended without an output."""
        for request in requests:
            self._reports.pop(request.request_id, None)
            self._pins.pop(request.request_id, None)

    def _count(self, kind: str, counts: TokenCounts, requests: int = 1) -> None:
        self.totals[f"requests|{kind}"] += requests
        self.totals["compile_tokens"] += counts.compile_work
        for name, value in _tokens(counts).items():
            if isinstance(value, Mapping):
                self.totals.update({f"{name}|{tier}": count for tier, count in value.items()})
                name, value = "loaded_tokens", sum(value.values())
            apart = name in ("linked_tokens", "padded_tokens")
            key = name if apart else f"prompt_tokens|{name.removesuffix('_tokens')}"
            self.totals[key] += value

    def _chunks(self, args: RequestArgs | None, link: Link | None) -> Iterator[dict[str, Any]]:
        names = defaultdict[Key, set[Key]](set)
        for canonical in link.plan.canonicals if link else ():
            names[canonical.key].update(canonical.keys)
        spans = args.spans if args else ()
        keys = link.keys_by_span(len(spans)) if link else repeat(None)
        for span, key in zip(spans, keys, strict=False):
            state = _state(link, names[key]) if link and key and key in names else "text"
            found = {"span": list(span), "state": state}
            if key and state == "compiled":
                found["reason"] = self._store.get(key).missed
            yield found


def _tokens(counts: TokenCounts) -> Mapping[str, Any]:
    """The prompt's tokens by kind: all of it, but for linked and padded ones, once."""
    loaded, prefix = dict(counts.loaded), counts.prefix or 0
    return {
        "chunk_hit_tokens": (counts.reused or 0) - prefix - sum(loaded.values()),
        "prefix_hit_tokens": prefix,
        "loaded_tokens": loaded,
        "compiled_tokens": counts.compiled,
        "computed_tokens": counts.computed,
        "linked_tokens": counts.linked,
        "padded_tokens": counts.padded,
    }


def _state(link: Link, names: set[Key]) -> str:
    """How the blocks of a chunk came into the pool; one that was computed counts for all."""
    if not names.isdisjoint(link.brought.compiled):
        return "compiled"
    tiers = (link.brought.loaded[name] for name in names if name in link.brought.loaded)
    return next((f"loaded:{tier}" for tier in tiers), "hit")
