"""The page of kernels, from what was measured: nothing is timed here."""

from picbench.experiments.gpu_kernels import report

FACTS = ("gpu", "driver", "cuda", "torch", "triton", "vllm", "seed", "rounds", "commit")
SPREAD = {"median": 0.5, "q25": 0.4, "q75": 0.6}


def test_both_ways_of_link_are_shown_where_both_were_timed() -> None:
    one = {"kind": "link", "form": "runs", "new": 1100, "context": 32768, "served_by": "tiles"}
    one |= {"time_vs_fa3": SPREAD, "prepare_ms": {"link": 0.3, "in place": 0.9, "copied": 0.25}}
    ways = {"fa3": 1.0, "link": 0.75, "in place": 0.625, "copied": 0.751}
    one |= {"ms": {name: {"median": ms} for name, ms in ways.items()}}
    other = one | {"new": 8192, "prepare_ms": {"link": 0.3}}
    other |= {"ms": {name: {"median": ways[name]} for name in ("fa3", "link")}}
    run = dict.fromkeys(FACTS, "x") | {"workspace_bytes": 1 << 29}
    page = report({"provenance": run, "results": [one, other]})
    spread = "0.50 (0.40-0.60)"
    row = f"| tiles | 1.000 | 0.750 | {spread} | 0.625 | 0.751 | 0.900 | 0.250 |"
    assert f"| runs | 1100 | 32768 {row}" in page
    assert f"| tiles | 1.000 | 0.750 | {spread} | - | - | - | - |" in page
