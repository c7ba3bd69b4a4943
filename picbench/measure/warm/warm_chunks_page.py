"""The page and the figures of warm chunks: TTFT by arm, against a prefix hit, on a busy host."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from picbench.measure.report import Spread, save, update_summary
from picbench.measure.warm.served_engine import FirstToken
from picbench.output import markdown

#: The arm that others are compared with, and stock vLLM's that it is compared with.
FIRST, HIT = "mepic", "prefix hit"

#: Answers by load of the host (`quiet`, `busy`) and by arm, repeat by repeat.
Loads = dict[str, dict[str, list[FirstToken]]]

#: Milliseconds by arm, repeat by repeat.
Times = Mapping[str, Sequence[float]]


def times_of(answers: Mapping[str, Sequence[FirstToken]]) -> dict[str, list[float]]:
    """Milliseconds by arm."""
    return {arm: [answer.ms for answer in found] for arm, found in answers.items()}


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Ratios of times in the same repeat."""
    return Spread.of([one / other for one, other in zip(above, below, strict=True)])


def summary_of(loads: Loads) -> dict[str, float]:
    """TTFT of the first arm, its share of a prefix hit's, and what busy cores make of it."""
    quiet = times_of(loads["quiet"])
    figures = {
        "ms": median(quiet[FIRST]),
        "vs_prefix_hit": ratios(quiet[FIRST], quiet[HIT]).median,
    }
    if "busy" in loads:
        busy = times_of(loads["busy"])
        figures["busy_ratio"] = ratios(busy[FIRST], quiet[FIRST]).median
    return figures


def write(loads: Loads, facts: Mapping[str, Any], output: Path) -> None:
    """Write the files, and the summary's figures."""
    fresh = {arm: sorted({a.fresh for a in found}) for arm, found in loads["quiet"].items()}
    ttft = {load: times_of(answers) for load, answers in loads.items()}
    document = {"schema": 2, "provenance": facts, "ttft_ms": ttft, "new_tokens": fresh}
    save(output / "warm-chunks", document, render(loads, facts))
    update_summary(output, {"warm_ttft": summary_of(loads)})


def render(loads: Loads, facts: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    quiet = times_of(loads["quiet"])
    lines = [
        f"# TTFT of {facts['chunks']} warm chunks, by what they were compiled after",
        "",
        f"{facts['model']}, {facts['dtype']}: times, not answers; {facts['gpu']}, driver "
        f"{facts['driver']}, vLLM {facts['vllm']}, torch {facts['torch']}, commit "
        f"{facts['commit']}. {facts['prompt_tokens']:,} tokens: a text of {facts['head']}, "
        f"{facts['chunks']} chunks of {facts['chunk']} random tokens in a new order each time, "
        f"{facts['sections']} of them a document, and a question of {facts['question']}. One "
        "request at a time, arms in turn and in a new order each time, "
        f"n={len(quiet[FIRST])}. Engine cores have processes of their own. Chunks are cached; "
        f"`{HIT}` and `full` are stock vLLM, of whose prompts all but as many tokens as "
        f"`{FIRST}` computes are cached, or none.",
        "",
        "Milliseconds from the request's arrival; median (quartiles).",
        "",
        markdown.table(
            ("arm", "new tokens", "TTFT, ms", f"over {FIRST}: of medians", "repeat by repeat"),
            [_row(arm, loads["quiet"][arm], quiet) for arm in quiet],
            right=1,
        ),
        "",
        f"`{FIRST}` takes {_quartiles(ratios(quiet[FIRST], quiet[HIT]), 3)} of a prefix hit that "
        "leaves as many new tokens, repeat by repeat.",
    ]
    if "busy" in loads:
        lines += ["", *_busy(times_of(loads["busy"]), quiet, facts)]
    return "\n".join(lines) + "\n"


def _row(arm: str, answers: Sequence[FirstToken], times: Times) -> tuple[str, ...]:
    own, first = times[arm], times[FIRST]
    fresh = sorted({answer.fresh for answer in answers})
    return (
        f"`{arm}`",
        " - ".join(f"{count:,}" for count in dict.fromkeys((fresh[0], fresh[-1]))),
        _quartiles(Spread.of(own), 1),
        f"{median(own) / median(first):.3f}",
        "-" if arm == FIRST else _quartiles(ratios(own, first), 3),
    )


def _busy(busy: Times, quiet: Times, facts: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"`{arm}`", _quartiles(Spread.of(own), 1), _quartiles(ratios(own, quiet[arm]), 3))
        for arm, own in busy.items()
    ]
    head = ("arm", "TTFT, ms", "over the quiet host, repeat by repeat")
    told = f"The same while {facts['busy_cores']} cores compute something else:"
    return [told, "", markdown.table(head, rows, right=1)]


def _quartiles(spread: Spread, digits: int) -> str:
    numbers = (f"{number:,.{digits}f}" for number in (spread.median, spread.q25, spread.q75))
    return "{} ({} - {})".format(*numbers)
