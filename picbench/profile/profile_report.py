"""What `picbench profile` says: a sentence, a picture and a table, or all of it as JSON."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from math import isinf
from textwrap import fill
from typing import Any

from picbench.profile.predictor import GridPredictor
from picbench.profile.profile import ArmProfile, TraceProfile, advise
from picbench.tables.table import NOTHING, Column, Table, bar

#: Characters of a line in a terminal.
_WIDTH = 80

#: Those of an arm's name before it is folded.
_NAME = 20


class ProfileReport:
    """What is shown: counts, what a grid predicts of them, and the advice."""

    def __init__(self, profile: TraceProfile, predictor: GridPredictor | None) -> None:
        self._profile, self._predictor = profile, predictor
        self._errors = predictor.errors() if predictor else None
        self._queues = bool(predictor and profile.traffic.rate)
        self.advice = advise(profile)

    def markdown(self) -> str:
        """The report as a page."""
        blocks = [*self._lines(), self._table().markdown(right=1), self._legend()]
        told = f"**{self.advice.sentence or self.advice.line}**"
        return "\n\n".join([told, *blocks, *self._grid_lines(), self.advice.line])

    def text(self) -> str:
        """The report for a terminal of 80 columns; it ends in the decision."""
        lines = [*self._lines(), self._legend(), *self._grid_lines()]
        notes = "\n".join(_filled(line) for line in lines)
        decision = _filled(self.advice.sentence or self.advice.line)
        blocks = [notes, decision, "\n".join(self._picture()), "\n".join(self._headroom())]
        return "\n\n".join(filter(None, [*blocks, *self._narrow()]))

    def _picture(self) -> Iterator[str]:
        """Bars of prefix caching, or what was taken for it, and of the best arm with chunks."""
        arms = {arm.spec: arm for arm in self._profile.arms}
        ours = arms.get(self.advice.ours or "")
        if ours is None:
            return
        both = [arms.get("prefix") or next(iter(arms.values())), ours]
        drawn: dict[str, Callable[[ArmProfile], float | None]] = {
            "computed tokens": lambda arm: arm.computed,
            "first token, ms": lambda arm: (
                arm.predicted.ttft_s * 1e3 if arm.predicted and arm.predicted.ttft_s else None
            ),
            "KV memory, GiB": lambda arm: arm.predicted.kv_gib if arm.predicted else None,
            "answers kept, %": lambda arm: (self._profile.least(arm) or 0) * 100 or None,
        }
        width = min(_NAME, max(len(arm.spec) for arm in both))
        for heading, value in drawn.items():
            found = [value(arm) for arm in both]
            for number, (arm, own) in enumerate(zip(both, found, strict=True)):
                if own is not None and None not in found:
                    share = own / max(*(v or 0 for v in found), 1e-12)
                    drawing = bar(share, _WIDTH - 31 - width)
                    digits = 0 if own >= 100 else 1 if own >= 10 else 2
                    title = heading if not number else ""
                    shown = f"{own:>10,.{digits}f}"
                    yield f"{title:16}  {arm.spec[:width]:{width}} {shown} {drawing}"

    def _headroom(self) -> Iterator[str]:
        """What prefix caching leaves, by cause."""
        found, prompt = self._profile.headroom, self._profile.traffic.prompt
        if found is None or self._profile.sees != "contents":
            return
        total = sum(found.moved.values())
        yield f"Seen before at another place: {total / prompt:.1%} of prompt tokens"
        for cause, tokens in found.moved.items():
            if tokens:
                yield f"  {cause:30} {tokens / prompt:6.1%} {bar(tokens / prompt, 40)}"
        if self._profile.pool:
            yield f"  {'expired (a tier would save it)':30} {found.expired / prompt:6.1%}"

    def _narrow(self) -> Iterator[str]:
        """The table, in as many blocks of columns as fit a line."""
        table = self._table()
        names, *columns = zip(table.head, *table.texts(), strict=True)
        folded = [fill(name.replace(":", ": "), _NAME).replace(": ", ":") for name in names]
        block: list[list[str]] = []
        for column in columns:
            head = fill(column[0], max(8, *map(len, column[1:])), break_long_words=False)
            cells = [head, *column[1:]]
            width = _NAME + sum(2 + _wide(cell) for cell in (*block, cells))
            if block and width > _WIDTH:
                yield _laid_out([folded, *block])
                block = []
            block.append(cells)
        yield _laid_out([folded, *block])

    def json(self) -> str:
        """All figures; times in seconds, None for what is infinite or not known."""
        profile, traffic, predictor = self._profile, self._profile.traffic, self._predictor
        calibration = predictor.calibration if predictor else None
        document = {
            "schema": 1,
            "simulation": True,
            "trace": {"name": profile.name, "kind": profile.kind, "exact": profile.exact},
            "pool": profile.pool,
            "running": profile.running,
            "traffic": {
                "requests": traffic.requests,
                "prompt_tokens": traffic.prompt,
                "output_tokens": traffic.output,
                "chunks": traffic.chunks,
                "chunk_tokens": traffic.chunk_tokens,
                "repeated": traffic.repeated,
                "rate": traffic.rate,
            },
            "arms": {arm.spec: _figures(arm) | {"kept": profile.kept(arm)} for arm in profile.arms},
            "answers": {measured.name: measured.about for measured in profile.answers},
            "grid": predictor.grid.about() if predictor else None,
            "calibration": calibration.about() if calibration else None,
            "warning": predictor.warning if predictor else None,
            "errors": asdict(self._errors) if self._errors else None,
            "advice": asdict(self.advice),
            "sees": profile.sees,
            "note": profile.note,
            "headroom": profile.headroom
            and {
                "moved": profile.headroom.moved,
                "expired": profile.headroom.expired,
            },
        }
        return json.dumps(document, indent=1)

    def _table(self) -> Table:
        """A row for each arm."""
        shown: dict[str, Callable[[ArmProfile], str]] = {
            "arm": lambda arm: arm.spec,
            "saved": lambda arm: f"{arm.unbounded.saved:z.1%}",
            "computed a request": lambda arm: (
                f"{arm.computed:,.0f}" if arm.counted.requests else NOTHING
            ),
        }
        if self._profile.pool:
            shown |= {
                f"saved, pool of {self._profile.pool:,}": lambda arm: f"{arm.counted.saved:z.1%}",
                "evicted blocks": lambda arm: f"{arm.counted.evicted_blocks:,}",
                "refused": lambda arm: f"{arm.counted.refused:,}",
            }
        for measured in self._profile.answers:
            shown[f"keeps, {measured.name}"] = partial(self._profile.kept_text, name=measured.name)
        columns = {name: [text(arm) for arm in self._profile.arms] for name, text in shown.items()}
        found = [arm.predicted for arm in self._profile.arms if arm.predicted]
        if found:
            columns["TTFT, ms"] = [_ranged(f.ttft_s, f.ttft_s_range, _ms) for f in found]
            columns["requests/s"] = [
                _ranged(f.requests_s, f.requests_s_range, "{:,.2f}".format) for f in found
            ]
            columns["KV, GiB"] = [f"{f.kv_gib:.2f}" for f in found]
        if self._queues:
            columns["TTFT at its rate, ms"] = [_ranged(f.loaded_ttft_s, None, _ms) for f in found]
        rows = list(zip(*columns.values(), strict=True))
        return Table(self._profile.name, [Column(heading) for heading in columns], rows)

    def _lines(self) -> Iterator[str]:
        """What stands above the table."""
        traffic = self._profile.traffic
        yield f"simulation: no model was run. {self._profile.name} ({self._profile.kind})"
        rate = f", {traffic.rate:.3g} a second" if traffic.rate else ""
        yield (
            f"{traffic.requests:,} request{'s' * (traffic.requests > 1)}{rate}; "
            f"{traffic.prompt / traffic.requests:,.0f} prompt tokens, "
            f"{traffic.chunks / traffic.requests:.1f} chunks and "
            f"{traffic.output / traffic.requests:,.0f} generated tokens each on average; "
            f"{traffic.repeated:.1%} of chunk tokens in chunks seen before"
        )
        yield (
            "Reuse is counted by token ids, block by block."
            if self._profile.exact
            else "Reuse is counted block by block; contents with different names count as "
            "different from their first token on."
        )
        if self._profile.note:
            yield f"Note: {self._profile.note}."

    def _legend(self) -> str:
        """What the columns mean."""
        arms = self._profile.arms
        copies = any(getattr(arm.algorithm, "private", False) for arm in arms)
        ranges = any(arm.predicted and arm.predicted.ttft_s_range for arm in arms)
        parts = {
            "saved: prompt tokens that need not be computed, less those of compiling chunks; by a "
            "cache that never evicts.": True,
            "Private copies are made from a tier that never forgets.": copies,
            "Not counted: what it takes to pick tokens while a request runs.": any(
                arm.algorithm.plan_chunk(1, 100).selection for arm in arms
            ),
            "In brackets: where 90 % of the grid's single measurements lie around such a "
            "prediction, TTFT's around medians of as many such requests.": ranges,
            f"KV: of {self._profile.running} requests at a time.": self._predictor,
            "TTFT at its rate: by the formula of a queue.": self._queues,
        }
        unknown = [arm.spec for arm in arms if self._profile.least(arm) is None]
        parts |= {
            f"keeps, {one.name}: the share of full recompute's score, the least and the most of "
            f"{len(next(iter(one.kept.values())))} data sets, with {one.about}.": True
            for one in self._profile.answers
        }
        parts[f"Not advised, as their loss is not known here: {', '.join(unknown)}."] = bool(
            unknown
        )
        return " ".join(text for text, shown in parts.items() if shown)

    def _grid_lines(self) -> Iterator[str]:
        """What the predictions are worth."""
        if self._predictor is None or self._errors is None:
            yield "No grid was measured: neither times nor memory are predicted."
            return
        yield f"Predicted from: {self._predictor.grid.about()}"
        if self._predictor.calibration:
            yield f"At the speed of: {self._predictor.calibration.about()}"
        if self._predictor.warning:
            yield f"Warning: {self._predictor.warning}"
        ttft, requests_s = self._errors.texts()
        yield f"Leave-one-out error of TTFT: {ttft}"
        yield f"Leave-one-out error of requests/s: {requests_s}"
        pool, running, arms = self._profile.pool, self._profile.running, self._profile.arms
        if crowded := [arm.spec for arm in arms if pool and arm.peak_blocks > pool]:
            yield (
                f"{running} requests at a time hold more than the pool, so they would wait, which "
                f"requests/s and KV leave out (lower --running): {', '.join(crowded)}"
            )
        if outside := [arm.spec for arm in arms if arm.predicted and not arm.predicted.inside]:
            yield f"Outside of the measured grid, so extrapolated: {', '.join(outside)}"


def _ranged(
    value: float | None, ends: tuple[float, float] | None, text: Callable[[float], str]
) -> str:
    if value is None:
        return NOTHING
    return text(value) + (f" ({text(ends[0])}-{text(ends[1])})" if ends else "")


def _ms(seconds: float) -> str:
    return "overloaded" if isinf(seconds) else f"{seconds * 1e3:,.1f}"


def _figures(arm: ArmProfile) -> dict[str, Any]:
    figures = asdict(arm.predicted) if arm.predicted else {}
    finite = {k: None if isinstance(v, float) and isinf(v) else v for k, v in figures.items()}
    return {
        "unbounded": asdict(arm.unbounded) | {"saved": arm.unbounded.saved},
        "limited": asdict(arm.limited) | {"saved": arm.limited.saved} if arm.limited else None,
        "peak_blocks": arm.peak_blocks,
        "predicted": finite or None,
    }


def _filled(text: str) -> str:
    return fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _wide(cells: list[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))


def _laid_out(columns: list[list[str]]) -> str:
    """Cells of several lines under one another, names to the left and all else to the right."""
    widths = [_wide(column) for column in columns]
    lines = []
    for row in zip(*columns, strict=True):
        cells = [cell.split("\n") for cell in row]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            first, *others = zip(parts, widths, strict=True)
            right = (text.rjust(width) for text, width in others)
            lines.append("  ".join((first[0].ljust(first[1]), *right)).rstrip())
    return "\n".join(lines)
