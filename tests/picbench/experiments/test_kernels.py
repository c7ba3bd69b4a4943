"""What kernels are measured with: no wrong one is timed, and pages say what was found."""

from pathlib import Path
from typing import Any

import pytest
import torch

from picbench.errors import ConfigError, InvalidRun
from picbench.experiments import cpu_kernels, kernels, shared_kernels
from picbench.experiments.scenes import check, draw, plain, require_right, rope_table
from picbench.kernels.cuda.decode.shared.sharing_costs import (
    SharedReads,
    SharingCosts,
    least_readers,
    own_ms,
    pays,
    query_rows,
    shared_ms,
)
from picbench.kernels.shape import HeadShape
from picbench.run.measurements import DecodeShared, Kernels

NAN = float("nan")


@pytest.mark.parametrize("errors", [[0.0, 0.02], [NAN, 0.0], [0.0, NAN], [1e-2 + 1e-3]], ids=str)
def test_one_that_is_too_large_or_no_number_is_refused(errors: list[float]) -> None:
    with pytest.raises(InvalidRun, match="decode of it: relative error") as refused:
        require_right("decode of it", errors, torch.bfloat16)
    assert "nothing was timed" in refused.value.hint
    assert require_right("decode", [1e-3, 2e-3, 0.0], torch.bfloat16) == pytest.approx(2e-3)
    with pytest.raises(InvalidRun):
        require_right("decode", [1e-3], torch.float32)


@pytest.mark.parametrize("new", [1, 4])
def test_requests_at_both_ends_and_in_the_middle_are_compared(new: int) -> None:
    shape = HeadShape(4, 2, 32, torch.float32)
    scene = draw([plain(20, new)] * 5, shape, rope_table(32, 64, "cpu"), device="cpu")
    query = scene.queries(5 * new)
    ends = torch.arange(20 - new, 20, dtype=torch.int32)
    right = torch.cat([scene.expected(i, own, ends) for i, own in enumerate(query.split(new))])
    out = torch.empty_like(query)

    def checked() -> float:
        return check("it", scene, query, out, lambda: out.copy_(right))

    assert checked() < 1e-6
    right[new] = right[3 * new] = NAN
    assert checked() < 1e-6
    right[5 * new - 1] = 0.0
    with pytest.raises(InvalidRun, match="it: relative error"):
        checked()
    with pytest.raises(InvalidRun, match="it: relative error nan"):
        check("it", scene, query, out, lambda: None)


def facts(*names: str, **known: object) -> dict[str, Any]:
    named = ("gpu", "driver", "torch", "vllm", "seed", "rounds", "commit", *names)
    return dict.fromkeys(named, "x") | known


def test_decode_and_link_have_a_table_each() -> None:
    spread = {"median": 0.5, "q25": 0.4, "q75": 0.6}
    link = {"kind": "link", "form": "runs", "new": 1100, "context": 32768, "served_by": "tiles"}
    link |= {"ms": {"fa3": {"median": 1.0}, "link": {"median": 0.75}}, "time_vs_fa3": spread}
    decode = {"kind": "decode", "requests": 16, "context": 8192, "chunk": 500, "bytes": 2 << 30}
    decode |= {"ms": {"fa3": {"median": 0.5}}}
    decode |= {"speed_vs_fa3": dict.fromkeys(("turned", "unrotated", "parts"), spread)}
    run = facts("cuda", "triton", workspace_bytes=1 << 29)
    page = kernels.report({"provenance": run, "results": [decode, link]})
    ratio = "0.50 (0.40-0.60)"
    assert f"| 16 | 8192 | 500 | 0.500 | 4.29 | {ratio} | {ratio} | {ratio} |" in page
    assert f"| runs | 1100 | 32768 | tiles | 1.000 | 0.750 | {ratio} |" in page
    assert kernels.summarise([decode, link]) == {"decode_vs_fa3": 0.5, "link_vs_fa3": 0.5}


@pytest.mark.engine
@pytest.mark.parametrize("wrong", ["stock", "own"])
def test_a_kernel_of_the_cpu_that_is_wrong_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def layers(*_: Any, **__: Any) -> list[Any]:
        return [lambda: None]

    case = cpu_kernels.AttentionCase("decode", HeadShape(4, 2, 32, torch.float32), 2, 1, 40)
    monkeypatch.setattr(cpu_kernels, f"{wrong}_layers", layers)
    monkeypatch.setattr(kernels, "interleave", pytest.fail)
    with pytest.raises(InvalidRun, match="relative error nan"):
        cpu_kernels.measure(case, Kernels())


@pytest.mark.engine
def test_kernels_of_the_cpu_are_checked_and_timed() -> None:
    shape = HeadShape(4, 2, 32, torch.float32)
    for case in (("prefill", shape, 1, 70, 70), ("decode", shape, 3, 1, 75)):
        row = cpu_kernels.measure(cpu_kernels.AttentionCase(*case), Kernels(rounds=5, seconds=0))
        assert row["paired_ratio"]["stock"]["median"] == 1.0
        assert set(row["ratio_of_best"]) == {"stock", "in_place", "unrotated"}


LLAMA = HeadShape(32, 8, 128, torch.bfloat16)


@pytest.mark.parametrize("case", shared_kernels.CASES, ids=lambda case: case.name)
def test_cases_share_as_much_as_they_say(case: shared_kernels.SharedCase) -> None:
    reads = [read.chunks for read in case.reads(seed=3)]
    assert {len(set(own)) for own in reads} == {case.chosen}
    asked = [chunk for own in reads for chunk in own]
    assert len(asked) == case.requests * case.chosen
    assert max(asked) < case.chunks
    assert (len(set(asked)) == len(asked)) == case.apart


def test_the_page_says_what_was_found() -> None:
    arms = ["own", "chosen", *shared_kernels.LAUNCHES, "of groups", "of tiles", "of merge"]
    times = {name: {"median": 1.5, "best": 1.25} for name in arms}
    row = {
        "case": shared_kernels.CASES[0].name,
        "sharing": 32.0,
        "apart": False,
        "errors": {"shared": 2e-3},
        "ms": times,
        "own_over": {"chosen": {"median": 6.5}},
        "read_gb": 3.0,
        "tflop": 0.3,
        "estimate_ms": {"asked": 1.75, "shared": 0.25},
    }
    document = {"provenance": facts("cuda", "triton"), "cases": [row], "host": {"comes": 0.25}}
    page = shared_kernels.report(document)
    assert "| 64 x 64 of 128 x 512 + 1104 | 32.0 | - | 1.500" in page
    assert "shared_gb_ms >= 2.00, tflop_ms >= 0.200" in page


def test_the_host_is_timed() -> None:
    found = shared_kernels.grouping_times(rows=4, chosen=3, chunks=5)
    assert list(found) == ["goes", "comes", "changes", "idle"]
    assert all(0 < spent < 1000 for spent in found.values())


@pytest.mark.parametrize(
    ("readers", "group", "rows"),
    [(0, 4, 0), (1, 4, 16), (4, 4, 16), (5, 4, 64), (16, 4, 64), (20, 4, 80), (32, 4, 128)],
)
def test_rows_of_products(readers: int, group: int, rows: int) -> None:
    assert query_rows(readers, group) == rows


def test_a_cell_is_never_shared_by_one() -> None:
    assert least_readers(32, LLAMA, SharingCosts(own_gb_ms=1e-9)) == 2
    assert not pays(SharedReads(), LLAMA, SharingCosts(launch_ms=0.0))


def test_what_many_read_costs_less_once() -> None:
    """64 requests of 64 of 128 chunks of 512 tokens: about what must be read and multiplied."""
    reads = SharedReads()
    for _ in range(128):
        reads = reads.plus(32, 32, LLAMA.group)
    costs = SharingCosts()
    assert pays(reads, LLAMA, costs)
    assert own_ms(reads, LLAMA, costs) == pytest.approx(1.95, rel=0.02)
    assert 0.1 < shared_ms(reads, LLAMA, costs) < 0.25


def test_sharing_does_not_pay_where_merging_costs_more_than_reading() -> None:
    reads = SharedReads().plus(4, 2, LLAMA.group)
    assert pays(reads, LLAMA, SharingCosts(launch_ms=0.0))
    assert not pays(reads, LLAMA, SharingCosts(parts_gb_ms=0.05, launch_ms=0.0))
    assert not pays(reads, LLAMA, SharingCosts())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_shared_decode_is_refused_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vLLM runs on cpu here, not on cuda"):
        shared_kernels.measure(DecodeShared(output=tmp_path))
