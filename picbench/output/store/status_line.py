"""The last line of `picbench run` on stdout: how a run ended, for programs."""

import json
from pathlib import Path
from typing import Any

from picbench.output.run_reader import read_run
from picbench.output.store.overview import arms_of
from picbench.output.summary import ArmSummary


def status_line(path: Path, exit_code: int) -> str:
    """One line of JSON about the run directory `path`, whose command ends with `exit_code`.

    Times are in milliseconds; null is what was not measured.
    """
    run = read_run(path)
    return json.dumps(
        {
            "run": str(path),
            "status": run.manifest["status"],
            "exit_code": exit_code,
            "fingerprint": run.manifest["fingerprint"],
            "arms": {name: headline(arm) for name, arm in arms_of(run).items()},
        }
    )


def headline(arm: ArmSummary) -> dict[str, Any]:
    """The main numbers of an arm."""
    return {
        "provenance": arm.provenance,
        "requests": arm.requests,
        "failed": arm.failed,
        "ttft_p50_ms": None if arm.ttft_ms is None else arm.ttft_ms.p50,
        "ttft_vs_full": None if arm.ttft_vs_full is None else arm.ttft_vs_full.geomean,
        "score": arm.score.mean if arm.score.meaningful else None,
        "peak_blocks": arm.blocks.peak_referenced if arm.blocks.pool else None,
        "reused_tokens": arm.tokens.reused,
    }
