"""Which replies are shown beside each other."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from harness_fakes import FakeEngine, Harness, make_sample, run_fakes
from measured_arms import known

from picbench.engines.request import Request, Result
from picbench.errors import ConfigError
from picbench.report.contents import read_contents
from picbench.report.sections import browse_answers
from picbench.store.reader import read_run


@dataclass
class LateEngine(FakeEngine):
    """Fails the first sample in its first two attempts, then says which one this is."""

    attempts: list[int] = field(default_factory=list)

    def _answer(self, request: Request) -> Result:
        if request.segments[1].tokens != make_sample(0).segments[1].tokens:
            return super()._answer(request)
        self.attempts.append(len(self.attempts))
        if len(self.attempts) <= 2:
            raise ConfigError("not yet", hint="wait")
        return replace(super()._answer(request), text=f"attempt {len(self.attempts)}")


def test_a_reply_stands_at_its_own_repeat(tmp_path: Path) -> None:
    """Its group and the request alone fail in the first repeat; two more repeats are answered."""
    harness = Harness([make_sample(n) for n in range(2)], engines={"naive": LateEngine("naive")})
    path = run_fakes(harness, tmp_path / "run", "full", "naive", repeats=3)
    browser = known(browse_answers(read_contents(read_run(path), 0.02), 100_000))
    shown = {
        sample.sample: {row[0]: row[1] for row in sample.replies.rows} for sample in browser.samples
    }
    assert shown == {
        "s0#2": {"full": "yes", "naive": "attempt 3"},
        "s0#3": {"full": "yes", "naive": "attempt 4"},
    }
    assert all(sample.passages for sample in browser.samples)
