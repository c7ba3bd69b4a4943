"""Sizes of pools and contexts, and what fits a GPU."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness_fakes import Harness, make_sample
from hypothesis import given
from hypothesis import strategies as st

from picbench.cli import main
from picbench.engines.algorithms import parse
from picbench.engines.footprint import GpuFootprint
from picbench.engines.planning.policy import ChunkPolicy
from picbench.errors import ConfigError
from picbench.run.job import (
    CHUNK_EXTRA,
    SHARE,
    SPARE,
    STEP,
    Job,
    blocks,
    fit_pool,
    gpu_memory,
    measure_sizes,
    prepare,
)
from picbench.run.session import Services
from picbench.run.workload import Workload
from picbench.settings import RunConfig, parse_config
from picbench.store import provenance
from picbench.store.records import Sizes
from picbench.workloads.models import ModelSpec
from picbench.workloads.sample import Sample, SampleSegment


def sizes_of(*samples: Sample, specs: Sequence[str] = (), **settings: Any) -> Sizes:
    values = {"concurrency": 1, "context": None, "pool": None, **settings}
    return measure_sizes(samples, [parse(spec) for spec in specs], **values)


SAMPLE = make_sample(1, max_tokens=2)


def test_sizes_by_hand() -> None:
    sizes = sizes_of(SAMPLE, make_sample(2, max_tokens=20))
    assert sizes == Sizes(36 + 20, longest=4, chunks=3, pool=4 + 2 * CHUNK_EXTRA + 3 + SPARE + 1)
    with pytest.raises(ConfigError, match="`kv_blocks` 2: the longest request needs 3"):
        sizes_of(SAMPLE, pool=2)


@pytest.mark.parametrize(
    ("spec", "positions", "added"),
    [
        *((name, None, 0) for name in ("full", "naive", "mepic")),
        ("kvlink:n=5", None, 5 * len(SAMPLE.chunks)),
        ("kvlink:n=5", SAMPLE.prompt_tokens + 5, 3),
        ("epic:k=4:bos=chunk", None, len(SAMPLE.chunks)),
    ],
)
def test_the_context_has_room_for_what_algorithms_add(
    spec: str, positions: int | None, added: int
) -> None:
    sizes = sizes_of(SAMPLE, specs=[spec], positions=positions)
    assert sizes.context == SAMPLE.prompt_tokens + 2 + added


def test_the_pool_has_room_for_what_algorithms_add() -> None:
    plain = sizes_of(SAMPLE).pool
    assert sizes_of(SAMPLE, specs=("full", "naive", "epic", "mepic")).pool == plain
    assert sizes_of(SAMPLE, specs=["kvlink:n=500"]).pool >= plain + 500 // 16 - CHUNK_EXTRA


def test_an_algorithm_that_fails_is_no_bug_of_picbench(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, index: int, length: int) -> ChunkPolicy:
        raise IndexError("no such chunk")

    monkeypatch.setattr(type(parse("naive")), "plan_chunk", fails)
    with pytest.raises(ConfigError, match=r"`algo` naive: plan_chunk\(0, .*no such chunk \(test_"):
        sizes_of(SAMPLE, specs=["naive"])


def test_documents_that_prompts_do_not_show_need_room() -> None:
    """The longest compile is the prompt's first text, a document of 100 tokens, and a chunk."""
    lead = SampleSegment("text", "", tuple(range(100)))
    known = [replace(s, before=lead) if s.kind == "chunk" else s for s in SAMPLE.segments]
    sample = replace(SAMPLE, segments=tuple(known))
    specs = ["full", "naive:anchor=head:context=document"]
    sizes, bare = (sizes_of(one, specs=specs) for one in (sample, SAMPLE))
    longest = max(len(chunk.tokens) for chunk in SAMPLE.chunks)
    assert sizes.context == len(SAMPLE.segments[0].tokens) + 100 + longest
    assert abs(sizes.pool - bare.pool - blocks(100)) <= 1
    assert sizes_of(SAMPLE, sample, specs=specs).chunks == 2 * bare.chunks


def test_anchors_need_room() -> None:
    specs = ["full", "naive:anchor=./a.txt"]
    sizes, bare = sizes_of(SAMPLE, specs=specs, anchors={"./a.txt": (1,) * 100}), sizes_of(SAMPLE)
    longest = max(len(chunk.tokens) for chunk in SAMPLE.chunks)
    assert sizes.context == len(SAMPLE.segments[0].tokens) + 100 + longest
    assert abs(sizes.pool - bare.pool - blocks(100)) <= 1


@given(st.integers(1, 30), st.integers(1, 64), st.integers(1, 200))
def test_the_pool_is_even_and_holds_what_runs_at_once(
    count: int, concurrency: int, output: int
) -> None:
    samples = [make_sample(n, max_tokens=output) for n in range(count)]
    sizes = sizes_of(*samples, concurrency=concurrency)
    assert sizes.pool % 2 == 0
    assert sizes.pool >= min(count, concurrency) * sizes.longest + sizes.chunks


GIB = 1 << 30
ARMS = ("full", "prefix", "epic:k=16", "mepic")

#: Of Llama-3.1-8B in bfloat16 as `GpuFootprint.of` gives it, rounded: stock, and picbench's.
STOCK = GpuFootprint(15 * GIB, 0, GIB, GIB, GIB + GIB // 4, 2 << 20)
PIC = GpuFootprint(15 * GIB, GIB // 2, GIB, 2 * GIB, GIB + GIB // 4, 2 << 20)


FOUR = (STOCK, STOCK, PIC, PIC)


def test_four_engines_on_a_gpu_of_140_gib() -> None:
    pool, note = fit_pool(FOUR, 140 * GIB, 10_812, 678, chosen=False)
    assert pool == int((0.95 * 140 - 76) * GIB / (4 * (2 << 20))) // STEP * STEP == 7168
    assert note == (
        "the KV pool of each arm has 7,168 blocks instead of 10,812: so many fit 4 times on a GPU "
        "of 140.0 GiB"
    )
    assert fit_pool((STOCK, PIC), 140 * GIB, 10_812, 678, chosen=False) == (10_812, None)
    # Where the user chose it, nothing is set aside.
    assert fit_pool(FOUR, 140 * GIB, 10_000, 678, chosen=True) == (10_000, None)


def test_engines_that_do_not_fit_are_refused_with_what_they_need() -> None:
    with pytest.raises(ConfigError) as refused:
        fit_pool(FOUR, 80 * GIB, 10_812, 678, chosen=False)
    assert refused.value.message == (
        "`algo`: 4 engines together need 81.3 GiB of a GPU's memory, and 76.0 of its 80.0 can be "
        "used: weights 60.0, activations 4.0, graphs 6.0, workspace 1.0, runtime 5.0; pools of 678 "
        "blocks 5.3"
    )
    assert "`algo`" in str(refused.value.hint)


@pytest.mark.parametrize(("memory", "advice"), [(140, "`kv_blocks` below 10,1"), (40, "fewer")])
def test_a_chosen_pool_that_cannot_fit_is_refused(memory: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=r"`kv_blocks` 20000: .* 4 engines") as refused:
        fit_pool(FOUR, memory * GIB, 20_000, 678, chosen=True)
    assert str(refused.value.hint).startswith(advice)


@given(
    st.lists(
        st.builds(
            GpuFootprint,
            *(st.integers(0, 20 * GIB) for _ in range(5)),
            block=st.integers(1 << 10, 8 << 20),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 200 * GIB),
    st.integers(1, 50_000),
    st.integers(1, 2000),
)
def test_what_is_given_fits_and_what_is_refused_does_not(
    footprints: list[GpuFootprint], memory: int, wanted: int, least: int
) -> None:
    least = min(least, wanted)

    def taken(pool: int) -> int:
        return sum(f.fixed + (pool + 1) * f.block for f in footprints)

    try:
        pool, note = fit_pool(footprints, memory, wanted, least, chosen=False)
    except ConfigError:
        # Pools are even.
        assert taken(least + 2) > int(SHARE * memory)
        return
    assert taken(pool) <= int(SHARE * memory)
    assert least <= pool <= wanted
    assert (note is None) == (pool == wanted)


H200 = {"name": "NVIDIA H200", "driver": "580", "memory": "143771 MiB"}
L4 = H200 | {"memory": "23034 MiB"}


@pytest.mark.parametrize(
    ("gpus", "visible", "count", "mib"),
    [
        ([H200], None, 1, 143_771),
        ([H200, L4], None, 1, 143_771),
        ([H200, L4], None, 2, 23_034),
        ([H200, L4], "1", 1, 23_034),
        ([H200, L4], "1, 0", 1, 23_034),
        ([H200], None, 2, None),
        ([H200], "3", 1, None),
        ([H200], "", 1, None),
        ([H200], "MIG-4", 1, None),
        ([H200 | {"memory": "[N/A]"}], None, 1, None),
        ([], None, 1, None),
    ],
)
def test_the_gpus_that_count(
    gpus: list[Mapping[str, str]],
    visible: str | None,
    count: int,
    mib: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_package(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", no_package)
    monkeypatch.setattr(provenance, "gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_memory(count) == (None if mib is None else mib << 20)


class OneModel(Harness):
    """A harness whose model has a configuration, of a model with 4 GiB of embeddings."""

    folder: Path
    gpu = 140 * GIB

    def services(self) -> Services:
        return Services(self.load, self.launch, lambda count: self.gpu)

    def load(self, config: RunConfig) -> Workload:
        return replace(super().load(config), model=ModelSpec("m", self.folder, "dummy"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fields = {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 1 << 20,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


@pytest.fixture
def harness(model: Path) -> OneModel:
    made = OneModel([make_sample(n) for n in range(400)])
    made.folder = model
    return made


@pytest.fixture
def make_job(harness: OneModel) -> Callable[..., Job]:
    def make(gib: float, **flags: Any) -> Job:
        values = {"algo": ARMS, "dataset": "fake", **flags}
        return prepare(parse_config(values), harness.load, lambda count: int(gib * GIB))

    return make


def room_for(blocks: int, job: Job) -> float:
    """GiB of a GPU on which each arm has so many blocks."""
    model = json.loads((Path(job.workload.model.path) / "config.json").read_text())
    found = [GpuFootprint.of(job.engine(arm), model) for arm in job.arms]
    return sum(f.fixed + (blocks + 1) * f.block for f in found if f) / SHARE / GIB


def test_all_arms_get_the_same_pool_and_differ_in_their_algorithm_alone(
    make_job: Callable[..., Job],
) -> None:
    roomy = make_job(80)
    tight = make_job(room_for(300, roomy))
    assert (roomy.notes, roomy.sizes.pool) == ((), 470)
    assert (len(tight.notes), tight.sizes.pool) == (1, STEP)
    assert tight.fingerprint != roomy.fingerprint
    engines = [replace(tight.engine(arm), algorithm="", stock=False) for arm in tight.arms]
    assert engines == [engines[0]] * len(ARMS)
    assert engines[0].kv_blocks == STEP


def test_a_cpu_has_nothing_to_share_and_a_chosen_pool_stays(make_job: Callable[..., Job]) -> None:
    assert make_job(1, device="cpu").sizes == make_job(80).sizes
    assert make_job(80, kv_blocks=321).sizes.pool == 321


def test_engines_of_a_run_have_the_anchors_of_all_arms(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = "picbench.engines.conversion.ModelTokenizer.encode"
    monkeypatch.setattr(encode, lambda self, text: tuple(map(ord, text)))
    file, prints = tmp_path / "anchor.txt", []
    for text in ("abc", "abd", "abc"):
        file.write_text(text)
        job = make_job(80, algo=(f"naive:anchor={file}", "mepic:anchor=sample-2", "full"))
        prints.append(job.fingerprint)
        anchors = [job.engine(arm).anchors for arm in job.arms]
        assert anchors[0] == anchors[1] == anchors[2]
        assert anchors[0][str(file)] == tuple(map(ord, text))
        samples = job.workload.samples
        assert len(anchors[0]["sample-2"]) == sum(len(c.tokens) for c in samples[0].chunks[:2])
    assert prints[0] == prints[2] != prints[1]
    assert not make_job(80).anchors
    with pytest.raises(ConfigError, match=r"anchor=sample-9999: the run has \d+ chunks"):
        make_job(80, algo=("naive:anchor=sample-9999",))


def invoke(harness: OneModel, *arguments: str) -> Any:
    flags = ("run", "--dataset", "fake", "--data", "d", "--algo", ",".join(ARMS))
    return CliRunner().invoke(main, (*flags, *arguments), obj=harness.services())


def test_what_memory_limits_is_said_and_what_does_not_fit_is_refused_by_flag(
    harness: OneModel, make_job: Callable[..., Job]
) -> None:
    harness.gpu = int(room_for(300, make_job(80)) * GIB)
    told = invoke(harness, "--dry-run")
    assert told.exit_code == 0, told.stderr
    assert "the KV pool of each arm has 256 blocks instead of 470" in " ".join(told.stdout.split())
    harness.gpu = 24 * GIB
    refused = invoke(harness)
    assert refused.exit_code == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("picbench: --algo: 4 engines together need")
    assert "--tensor-parallel" in line
    assert harness.order == []
