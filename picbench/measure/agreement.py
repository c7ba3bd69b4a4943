"""Engine runs beside Hugging Face's replies: the same scores on the same tokens?"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from picbench.errors import ConfigError, IncomparableRuns, InvalidRun
from picbench.measure.report import save
from picbench.output import markdown
from picbench.output.run_reader import read_run

ARM = "full"
#: How far apart two mean scores may be.
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply: to which prompt (a hash of its tokens), what, and its score."""

    prompt: str
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Side:
    """The replies of one side to one data set, by sample, and what made them."""

    dataset: str
    dtype: str
    made_by: Mapping[str, Any]
    replies: Mapping[str, Reply]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Mean scores of both sides over `rows` rows; `same` is the share of replies that are equal."""

    dataset: str
    dtype: str
    rows: int
    vllm: float
    hugging_face: float
    same: float

    @property
    def difference(self) -> float:
        """The engine's mean score less Hugging Face's."""
        return self.vllm - self.hugging_face


def read_side(folder: Path) -> Side:
    """Read the arm `full` of a run directory.

    Raises ConfigError for what is not one, IncomparableRuns where not every request was answered.
    """
    try:
        run = read_run(folder)
        manifest = run.manifest
        rows = [row for row in run.rows if row.arm == ARM]
        engine = manifest["arms"][ARM]["engine"]
        made_by = {**engine, "git": manifest["provenance"]["git"]}
        dataset = manifest["config"]["dataset"]
    except (ConfigError, KeyError) as error:
        raise ConfigError(
            f"{folder}: not the directory of a run with the arm {ARM!r}",
            hint=f"picbench run --algo {ARM} --output {folder} makes one",
        ) from error
    if manifest["status"] != "complete" or any(row.error for row in rows):
        raise IncomparableRuns(f"{folder}: not every request was answered", hint="run it again")
    replies = {
        row.sample: Reply(row.prompt_sha256, row.text or "", row.score or 0.0) for row in rows
    }
    return Side(dataset, engine["dtype"], made_by, replies)


def read_replies(file: Path) -> list[Side]:
    """Read a file of Hugging Face's replies, a side for each data set in it."""
    try:
        noted = json.loads(file.read_text("utf-8"))
        found: dict[str, dict[str, Reply]] = {}
        for row in noted.pop("replies"):
            reply = Reply(row["prompt_sha256"], row["text"], row["score"])
            found.setdefault(row["dataset"], {})[row["sample"]] = reply
        return [Side(name, noted["dtype"], noted, replies) for name, replies in found.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: not a file of replies",
            hint="picbench measure agreement replies --output FILE makes one",
        ) from error


def measure(runs: Iterable[Path], files: Iterable[Path], output: Path) -> str:
    """Compare run directories with files of replies, write the result, and say that they agree.

    Raises InvalidRun where they do not.
    """
    references = [side for file in files for side in read_replies(file)]
    found = write([read_side(folder) for folder in runs], references, output)
    if apart := [one for one in found if abs(one.difference) > TOLERANCE]:
        names = ", ".join(f"{one.dataset} in {one.dtype}" for one in apart)
        raise InvalidRun(f"vLLM and Hugging Face differ by more than {TOLERANCE}: {names}")
    return f"{len(found)} comparisons, all within {TOLERANCE}: {output / 'agreement.md'}"


def compare(runs: Iterable[Side], references: Iterable[Side]) -> list[Agreement]:
    """Compare each run with the reference of its data set and type.

    Raises IncomparableRuns where there is none, or where it answered other prompts.
    """
    known = {(side.dataset, side.dtype): side for side in references}
    return [_compare(run, known.get((run.dataset, run.dtype))) for run in runs]


def write(runs: Sequence[Side], references: Sequence[Side], folder: Path) -> list[Agreement]:
    """Compare, and write ``agreement.json`` and ``agreement.md``."""
    found = compare(runs, references)
    made_by = {
        "vllm": [{"dataset": run.dataset, **run.made_by} for run in runs],
        "hugging_face": list({side.dtype: dict(side.made_by) for side in references}.values()),
    }
    results = [asdict(one) | {"difference": one.difference} for one in found]
    document = {"schema": 1, "model": "testbed", "rows": "synthetic", "results": results}
    save(folder / "agreement", document | made_by, _page(found, runs, references))
    return found


def _compare(run: Side, reference: Side | None) -> Agreement:
    name = f"{run.dataset} in {run.dtype}"
    if reference is None:
        raise IncomparableRuns(f"no replies to {name}", hint="name their file by `replies`")
    prompts = [
        {sample: reply.prompt for sample, reply in side.replies.items()}
        for side in (run, reference)
    ]
    if prompts[0] != prompts[1] or not prompts[0]:
        raise IncomparableRuns(
            f"{name}: the run and the replies are about other prompts",
            hint="give both the same rows and the same model folder",
        )
    pairs = [(reply, reference.replies[sample]) for sample, reply in run.replies.items()]
    return Agreement(
        run.dataset,
        run.dtype,
        len(pairs),
        vllm=fmean(ours.score for ours, _ in pairs),
        hugging_face=fmean(theirs.score for _, theirs in pairs),
        same=fmean(ours.text == theirs.text for ours, theirs in pairs),
    )


_ABOUT = """# vLLM against Hugging Face

The testbed model on synthetic rows, full recompute, greedy: mean scores (word F1; rouge-l for
samsum and multi_news) of the arm `full` on stock vLLM and of `LlamaForCausalLM` in transformers, on
the same token ids, which the comparison checks. `same` is the share of replies that are equal
letter by letter.

vLLM {vllm}, {engine}. transformers {transformers}, torch {torch}, {device}.
One fixed set of rows, decoded once: no spread to report.

    for d in {datasets}; do for t in {dtypes}; do
      picbench run --algo full --dataset $d --dtype $t --limit {rows} --output runs/$d-$t
    done; done
    for t in {dtypes}; do
      picbench measure agreement replies --dtype $t --rows {rows} --output runs/replies-$t.json
    done
    picbench measure agreement compare runs/*-*/ \\
      {flags} \\
      --output results/testbed

"""


def _page(found: Sequence[Agreement], runs: Sequence[Side], references: Sequence[Side]) -> str:
    engine, theirs = runs[0].made_by, references[0].made_by
    dtypes = list(dict.fromkeys(one.dtype for one in found))
    about = _ABOUT.format(
        vllm=engine["vllm"],
        engine=f"torch {engine['torch']}, {engine['device']}",
        transformers=theirs["versions"]["transformers"],
        torch=theirs["versions"]["torch"],
        device=theirs["device"],
        datasets=" ".join(dict.fromkeys(one.dataset for one in found)),
        dtypes=" ".join(dtypes),
        rows=max(one.rows for one in found),
        flags=" ".join(f"--replies runs/replies-{dtype}.json" for dtype in dtypes),
    )
    header = ("data set", "type", "rows", "vLLM", "Hugging Face", "difference", "same")
    return f"{about}{markdown.table(header, map(_cells, found))}\n"


def _cells(one: Agreement) -> tuple[str, ...]:
    scores = (f"{one.vllm:.4f}", f"{one.hugging_face:.4f}", f"{one.difference:+.4f}")
    return (one.dataset, one.dtype, str(one.rows), *scores, f"{one.same:.3f}")
