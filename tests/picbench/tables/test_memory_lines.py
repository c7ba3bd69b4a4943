"""Memory in bytes: what the ledger's blocks come to, and what is not accounted for."""

from dataclasses import replace
from pathlib import Path

import pytest
from harness_fakes import Harness, make_sample, run_fakes

from picbench.engines.ledger import MemoryUse, Occupancy
from picbench.metrics import METRICS, metrics_shown
from picbench.store.reader import read_run
from picbench.store.summary import MemorySummary, summarise_memory
from picbench.tables.run import memory_lines

GIB = 1 << 30


def test_what_is_held_beside_known_tensors_is_the_residual() -> None:
    cpu = MemoryUse("cpu", 4, 3, 2, process_bytes=10)
    assert (cpu.known_bytes, cpu.held_bytes, cpu.residual_bytes) == (9, 10, 1)
    gpu = MemoryUse("cuda", 4, 3, 2, process_bytes=99, allocated_bytes=12, reserved_bytes=16)
    assert (gpu.held_bytes, gpu.residual_bytes) == (12, 3)
    assert MemoryUse("cpu", 4, 3, 2).residual_bytes is None


def test_blocks_become_bytes() -> None:
    blocks = Occupancy(100, 20.0, 7.5, 60.0, 31.25)
    found = summarise_memory(blocks, 1000, [MemoryUse("cpu", 4, 3, 2, process_bytes=10)])
    assert found.peak_referenced_bytes == 20_000
    assert found.mean_referenced_bytes == 7_500
    assert (found.peak_resident_bytes, found.mean_resident_bytes) == (60_000, 31_250)
    assert found.residual_bytes == (1,)
    unknown = summarise_memory(blocks, None, ())
    assert unknown == MemorySummary(None, None, None, None, None)


def test_a_run_says_bytes_beside_blocks(tmp_path: Path) -> None:
    run_fakes(Harness([make_sample(0)]), tmp_path, "full", "mepic")
    run = read_run(tmp_path)
    memory = run.summary["mepic"].memory
    assert memory is not None
    assert memory.peak_referenced_bytes == 20 << 20
    assert memory.residual_bytes == (3 << 20,)
    assert METRICS["peak_gib"] in metrics_shown(run.summary.values())
    assert METRICS["peak_gib"].value(run.summary["mepic"]) == pytest.approx(20 / 1024)
    lines = list(memory_lines(run.summary))
    assert "a block has 1,048,576 bytes" in lines[0]
    assert lines[2] == (
        "mepic: weights 0.004, KV pool 0.002, workspaces 0.001, residual 0.003: "
        "0.010 GiB resident on the CPU"
    )


def test_an_arm_that_is_gone_has_no_workers(tmp_path: Path) -> None:
    harness = Harness([make_sample(n) for n in range(3)], dies_at={"mepic": 1})
    run_fakes(harness, tmp_path, "full", "mepic", concurrency=1)
    memory = read_run(tmp_path).summary["mepic"].memory
    assert memory is not None
    assert memory.workers == ()
    assert memory.block_bytes == 1 << 20


def test_a_gpu_is_told_by_its_allocator_and_its_driver(tmp_path: Path) -> None:
    run_fakes(Harness([make_sample(0)]), tmp_path, "full")
    arm = read_run(tmp_path).summary["full"]
    use = MemoryUse("cuda", 4 * GIB, 2 * GIB, GIB, GIB, 8 * GIB, 9 * GIB, 10 * GIB)
    found = replace(arm, memory=summarise_memory(arm.blocks, 1 << 20, [use]))
    assert list(memory_lines({"full": found}))[1] == (
        "full: weights 4.000, KV pool 2.000, workspaces 1.000, residual 1.000: "
        "8.000 GiB of torch's allocator, 10.000 GiB by the driver's count"
    )
