"""The comparison's ratios and page, from measurements made up for the purpose."""

import pytest

from picbench.experiments.engine_speed import ratios, render

FOUND = {
    "stock": {
        "ttft_ms": [10.0, 30.0, 20.0],
        "tpot_ms": [4.0],
        "tokens_per_s": [100.0],
        "warm_ttft_ms": [800.0],
        "warm_tpot_ms": [5.0],
        "hit_ttft_ms": [40.0],
    },
    "picbench": {
        "ttft_ms": [21.0, 19.0, 22.0],
        "tpot_ms": [5.0],
        "tokens_per_s": [97.0],
        "warm_ttft_ms": [50.0],
        "warm_tpot_ms": [5.0],
    },
}
FACTS = {"gpu": "G", "driver": "D", "torch": "T", "vllm": "V", "commit": "C", "model": "M"}


def test_ratios_are_ours_over_the_reference() -> None:
    found = ratios(FOUND)
    assert found["pic_off"] == {
        "throughput_ratio": pytest.approx(0.97),
        "ttft_ratio": pytest.approx(1.05),
        "tpot_ratio": pytest.approx(1.25),
    }
    assert found["warm_32k"] == {
        "speedup_vs_full": pytest.approx(16.0),
        "ratio_vs_prefix_hit": pytest.approx(1.25),
    }


def test_the_page_names_what_ran_and_what_did_not() -> None:
    page = render(FOUND, FACTS)
    assert "dummy weights" in page
    assert "20.00 (10.00 - 30.00, n=3)" in page
    assert "| 40.00 (40.00 - 40.00, n=1) | - |" in page
