"""What two runs must have in common."""

import pytest

from picbench.compare.comparison import check_comparable, conditions_of, mismatches
from picbench.errors import IncomparableRuns

MANIFEST = {
    "config": {"concurrency": 4, "output": "a", "algo": ["full"], "slo": None, "seed": 0},
    "workload": {"fingerprint": "f" * 64, "samples": 5, "arrivals": None, "preloaded_chunks": 0},
    "sizes": {"pool": 100, "context": 64, "longest": 4},
    "cache": "cold at start",
    "provenance": {
        "cpu": {"model": "C", "cores": 2},
        "gpus": [{"name": "H", "driver": "1"}],
        "packages": {"vllm": "1"},
        "git": {"commit": "a"},
    },
}


def changed(part: str, **values: object) -> dict[str, object]:
    section = MANIFEST[part]
    assert isinstance(section, dict)
    return {**MANIFEST, part: {**section, **values}}


@pytest.mark.parametrize(
    ("manifest", "field"),
    [
        (changed("config", concurrency=8), "config.concurrency is 4 and 8"),
        (changed("workload", fingerprint="e" * 64), "workload.fingerprint is ffff"),
        (changed("sizes", pool=50), "sizes.pool is 100 and 50"),
        ({**MANIFEST, "cache": "warm at start"}, "cache is cold at start and warm at start"),
    ],
)
def test_what_decides_the_numbers_is_refused_by_name(
    manifest: dict[str, object], field: str
) -> None:
    before, after = conditions_of(MANIFEST), conditions_of(manifest)
    with pytest.raises(IncomparableRuns, match=field) as raised:
        check_comparable(before, after, ("a", "b"))
    assert raised.value.exit_code == 3
    found = check_comparable(before, after, ("a", "b"), allow=True)
    assert [str(mismatch)[: len(field)] for mismatch in found] == [field]


@pytest.mark.parametrize(
    "manifest",
    [
        changed("config", output="b", algo=["mepic"], slo="ttft=5"),
        changed("sizes", longest=5),
        changed("provenance", packages={"vllm": "2"}, git={"commit": "b"}),
        changed("config", newer="setting"),
    ],
)
def test_what_does_not_decide_them_passes(manifest: dict[str, object]) -> None:
    assert check_comparable(conditions_of(MANIFEST), conditions_of(manifest), ("a", "b")) == []


def test_hardware_is_kept_apart() -> None:
    other = conditions_of(changed("provenance", cpu={"model": "D", "cores": 2}))
    assert check_comparable(conditions_of(MANIFEST), other, ("a", "b")) == []
    found = mismatches(conditions_of(MANIFEST).hardware, other.hardware)
    assert [str(m) for m in found] == ["provenance.cpu.model is C and D"]


def test_drivers_and_versions_are_what_may_be_compared() -> None:
    assert conditions_of(MANIFEST).hardware["provenance.gpus"] == ["H"]
    assert conditions_of(MANIFEST).versions["provenance.packages.vllm"] == "1"


def test_other_instructions_are_other_hardware() -> None:
    """Unless one of the runs is from before they were kept."""
    kept = ({"instructions": ["avx2"]}, {"instructions": ["avx2", "avx512f"]}, {})
    old, new, unknown = (
        conditions_of({"provenance": {"cpu": {"model": "C", "cores": 2, **more}}}).hardware
        for more in kept
    )
    assert [m.field for m in mismatches(old, new)] == ["provenance.cpu.instructions"]
    assert mismatches(old, unknown) == mismatches(unknown, old) == []
