"""The engine's accuracy on the testbed's rows against its model card, measured without an engine.

The card's scores are torch's with explicit masks, on the same rows (`workloads/testbed/evaluate`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.errors import InvalidRun
from picbench.inputs.workload import Workload, load_workload
from picbench.measure.report import save
from picbench.output import markdown, provenance
from picbench.run.config import parse_config
from picbench.run.protocol import to_request
from picbench.run.sizing import blocks
from picbench.workloads.testbed import DATASETS, model_path

#: An algorithm of the engine and the name that the card has for it.
ARMS = {"full": "full", "naive": "naive", "epic:k=16": "epic-16", "mepic": "mepic"}

#: How far apart mean scores may be: the standard error of 200 rows that are right or wrong is up
#: to 0.035, and both sides answer the same ones.
TOLERANCE = 0.03

#: Rows of a data set that the card speaks of.
ROWS = 200


@dataclass(frozen=True, slots=True)
class Score:
    """Mean scores of an arm on the rows of a data set: the engine's and the card's."""

    dataset: str
    arm: str
    rows: int
    engine: float
    card: float

    @property
    def difference(self) -> float:
        """The engine's mean score less the card's."""
        return self.engine - self.card


def measure(
    device: str, dtype: str, rows: int, eager: bool, commit: str | None, output: Path
) -> None:
    """Run all rows through all arms, write a page; InvalidRun where scores are apart."""
    workloads = [_workload(name, rows) for name in DATASETS]
    with Engine(_config(workloads, device, dtype, eager)) as engine:
        engine.warm_up()
        about = engine.describe()
        scores = [score for workload in workloads for score in _scores(engine, workload)]
    facts = provenance.facts(*provenance.ENGINE, device=device, commit=commit)
    facts |= {"dtype": about["dtype"], "eager": eager}
    write(scores, facts, output)
    check(scores)


def check(scores: Sequence[Score]) -> None:
    """Raise InvalidRun where scores over all of the card's rows are further apart than noise."""
    if apart := [s for s in scores if s.rows == ROWS and abs(s.difference) > TOLERANCE]:
        names = ", ".join(f"{s.arm} on {s.dataset}: {s.difference:+.3f}" for s in apart)
        raise InvalidRun(f"the engine's scores and the card's differ: {names}")


def write(scores: Sequence[Score], facts: Mapping[str, Any], output: Path) -> None:
    """Write ``accuracy-DTYPE.json`` and ``.md``."""
    results = [asdict(score) | {"difference": score.difference} for score in scores]
    document = {"schema": 1, "provenance": facts, "rows": "synthetic", "results": results}
    save(output / f"accuracy-{facts['dtype']}", document, render(scores, facts))


def render(scores: Sequence[Score], facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    found = {(score.arm, score.dataset): score for score in scores}
    datasets = list(dict.fromkeys(score.dataset for score in scores))
    rows = [
        [arm, *(_cell(found[arm, dataset]) for dataset in datasets)]
        for arm in dict.fromkeys(score.arm for score in scores)
    ]
    worst = max(abs(score.difference) for score in scores)
    return "\n".join(
        [
            "# The engine's accuracy against the model card's",
            "",
            f"Testbed model, {scores[0].rows} synthetic rows of each set, greedy, {facts['dtype']}"
            f"{', eager' if facts['eager'] else ''}; {facts['gpu']}, driver {facts['driver']}, "
            f"vLLM {facts['vllm']}, torch {facts['torch']}, commit {facts['commit']}. Mean scores "
            "(word F1; rouge-l of samsum and multi_news): picbench's engine / torch in bfloat16 "
            "without any engine. One fixed set of rows, decoded once: no spread to report.",
            "",
            markdown.table(["arm", *datasets], rows),
            "",
            f"Largest difference: {worst:.3f}.",
            "",
        ]
    )


def _cell(score: Score) -> str:
    return f"{score.engine:.3f} / {score.card:.3f}"


def _workload(dataset: str, rows: int) -> Workload:
    return load_workload(
        parse_config({"algo": tuple(ARMS), "dataset": dataset, "limit": rows, "model": "testbed"})
    )


def _config(workloads: Sequence[Workload], device: str, dtype: str, eager: bool) -> EngineConfig:
    samples = [sample for workload in workloads for sample in workload.samples]
    longest = max(sample.prompt_tokens + sample.max_tokens for sample in samples)
    return EngineConfig(
        model=str(model_path()),
        device=device,
        dtype=dtype,
        eager=eager,
        context=longest,
        kv_blocks=blocks(longest) * 200,
        max_requests=64,
    )


def _scores(engine: Engine, workload: Workload) -> list[Score]:
    card = json.loads((Path(model_path()) / "scores.json").read_bytes())["base"]["arms"]
    found = []
    for arm, name in ARMS.items():
        requests = [to_request(sample, arm) for sample in workload.samples]
        results = engine.generate(requests)
        mean = fmean(
            workload.grader.score(result.text, sample.answers) or 0.0
            for sample, result in zip(workload.samples, results, strict=True)
        )
        known = card[name][workload.dataset]
        found.append(Score(workload.dataset, arm, len(results), mean, known))
        print(f"{workload.dataset:12} {arm:10} {mean:.3f} / {known:.3f}", flush=True)
    return found
