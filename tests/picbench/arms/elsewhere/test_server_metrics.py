"""What is read of a server's metrics, and what is not known without them."""

from collections.abc import Callable

import pytest
from completion_server import CompletionServer, serving, vllm_metrics

from picbench.engines.request import Request, Text
from picbench.run.remote import Endpoint, RemoteServer
from picbench.run.server_metrics import parse_metrics
from picbench.store.records import ServerCounts

Metrics = Callable[[CompletionServer], str | None]


def counted(metrics: Metrics) -> ServerCounts | None:
    """What a server with these metrics is said to have counted over two requests of 4 tokens."""
    with serving(CompletionServer(metrics=metrics)) as server:
        remote = RemoteServer("theirs", Endpoint(server.url), lambda tokens: None)
        try:
            remote.ready()
            requests = [Request([Text(tokens=(n, 2, 3, 4))], max_tokens=2) for n in range(2)]
            return remote.run(requests, 1).counted
        finally:
            remote.close()


def test_counts_are_those_of_the_batch_and_of_all_engines() -> None:
    found = counted(vllm_metrics)
    assert found == ServerCounts(
        prompt_tokens=8,
        cached_tokens=18,
        queried_tokens=8,
        hit_tokens=16,
        preemptions=2,
        peak_kv_usage=0.25,
    )


def test_older_names_and_those_of_sglang_are_known() -> None:
    older = parse_metrics(
        "# TYPE vllm:gpu_prefix_cache_hits counter\n"
        'vllm:gpu_prefix_cache_hits{model_name="m"} 5.0\n'
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    )
    assert (older.counters, older.usage) == ({"hit_tokens": 5.0}, 0.5)
    sglang = parse_metrics(
        'sglang:prompt_tokens_total{model_name="m"} 10.0\n'
        'sglang:cached_tokens_total{cache_source="device"} 3.0\n'
        'sglang:cached_tokens_total{cache_source="host"} 4.0\n'
        'sglang:token_usage{model_name="m"} 0.75\n'
    )
    assert sglang.counters == {"prompt_tokens": 10.0, "cached_tokens": 7.0}
    assert sglang.usage == 0.75


def test_what_is_no_number_tells_nothing() -> None:
    found = parse_metrics(
        'vllm:kv_cache_usage_perc{engine="0"} NaN\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.5\n'
        "vllm:prompt_tokens_total +Inf\n"
    )
    assert (found.counters, found.usage) == ({}, 0.5)
    assert parse_metrics("vllm:kv_cache_usage_perc NaN\n").usage is None


def test_a_counter_that_begins_to_count_began_at_zero() -> None:
    def late(server: CompletionServer) -> str:
        shown = f"vllm:num_preemptions_total {len(server.bodies)}.0\n" if server.bodies else ""
        return f"vllm:prompt_tokens_total 7.0\n{shown}"

    found = counted(late)
    assert found is not None
    assert (found.preemptions, found.cached_tokens) == (2, None)


@pytest.mark.parametrize(
    "metrics",
    [
        lambda server: None,
        lambda server: "",
        lambda server: "go_gc_duration_seconds 0.1\n",
        lambda server: '{"error": "no metrics"}',
        lambda server: "vllm:prompt_tokens_total many\n",
    ],
    ids=["no page", "empty", "others", "json", "broken"],
)
def test_a_server_without_known_metrics_counts_nothing(metrics: Metrics) -> None:
    assert counted(metrics) is None


def test_a_page_that_is_gone_later_fails_no_request() -> None:
    assert counted(lambda server: None if server.bodies else vllm_metrics(server)) is None


def test_counters_that_were_set_back_count_nothing() -> None:
    assert counted(lambda server: f"vllm:prompt_tokens_total {9 - len(server.bodies)}.0\n") is None


@pytest.mark.parametrize(
    ("counts", "share"),
    [
        (ServerCounts(), None),
        (ServerCounts(prompt_tokens=10), None),
        (ServerCounts(prompt_tokens=10, cached_tokens=0), 0.0),
        (ServerCounts(prompt_tokens=10, cached_tokens=4, queried_tokens=8, hit_tokens=2), 0.4),
        (ServerCounts(queried_tokens=8, hit_tokens=2), 0.25),
        (ServerCounts(queried_tokens=8, hit_tokens=2, external_hit_tokens=4), 0.75),
        (ServerCounts(queried_tokens=0, hit_tokens=0), None),
    ],
)
def test_the_reused_share_is_absent_where_it_is_not_told(
    counts: ServerCounts, share: float | None
) -> None:
    assert counts.reused_share == share


def test_what_one_batch_does_not_tell_is_not_known_of_both() -> None:
    one = ServerCounts(prompt_tokens=3, cached_tokens=1, peak_kv_usage=0.5)
    two = ServerCounts(prompt_tokens=4, peak_kv_usage=0.25)
    assert one + two == ServerCounts(prompt_tokens=7, peak_kv_usage=0.5)
