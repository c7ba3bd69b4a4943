"""Attention on the first tokens of chunks."""

import numpy as np
import pytest

from picbench.papers.latency import even_shares, measure_attention
from picbench.papers.settings import RowExperiment, RowSettings

SETTINGS = RowSettings(dataset="musique", rows=2, arms=["full", "epic:k=16"], tokens=6)


def test_shares_are_those_of_chunks_but_the_first() -> None:
    attention = np.full((1, 1, 30), 0.01)
    attention[0, 0, 5] = 1.0
    attention[0, 0, 15] = 0.11
    shares = even_shares(attention, [(5, 15), (15, 25)], 4)
    assert shares[0, 0] == pytest.approx([5.5, 0.5, 0.5, 0.5])


def test_both_views_come_from_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from picbench.engines import oracle

    calls: list[str] = []

    class Looks:
        """Attends to the first token of each chunk, unless chunks are text."""

        def __init__(self, folder: object) -> None:
            pass

        def attention(self, segments: list[tuple[str, list[int]]], rule: object, asking: int):  # type: ignore[no-untyped-def]
            calls.append(segments[1][0])
            lengths = [len(tokens) for _, tokens in segments]
            found = np.ones((3, 2, sum(lengths)))
            if segments[1][0] == "chunk":
                found[..., np.cumsum(lengths)[:-2]] = 5.0
            return Tensor(found)

    class Tensor:
        """What has numbers."""

        def __init__(self, found: np.ndarray) -> None:
            self.numpy = lambda: found

    monkeypatch.setattr(oracle, "Oracle", Looks)
    wanted = {
        "sinks": RowExperiment(varies="layer", by="layer", cpu=SETTINGS),
        "places": RowExperiment(varies="token", by="token", cpu=SETTINGS),
    }
    said: list[str] = []
    sinks, places = measure_attention(wanted, SETTINGS, "epic", "abc", said.append)
    assert calls == ["text", "chunk"] * 2
    assert sinks.labels == ["1", "2", "3"]
    assert places.labels == ["1", "2", "3", "4", "5", "6"]
    assert places.seeds == [1, 2]
    assert places.spread("1", "full", "share").mean == 1.0
    first, second = (places.spread(label, "epic:k=16", "share").mean for label in "12")
    assert first is not None
    assert second is not None
    assert first == pytest.approx(5 * second, rel=1e-3)
    top = sinks.spread("2", "epic:k=16", "top_head_share").mean
    assert top == pytest.approx(sum((first, 3 * second)) / 4, rel=1e-3)
    assert sinks.repeats == "rows"
