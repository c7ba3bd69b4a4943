"""Several runs on one set of engines."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from picbench.arms.fleet import open_fleet
from picbench.errors import ConfigError, EngineError
from picbench.output.run_directory import RunDirectory, log_name
from picbench.run.job import Job
from picbench.run.progress import Progress
from picbench.run.session import Finished, Launch, Session


def sweep(
    jobs: Sequence[Job], launch: Launch, progress: Progress, logs: Path
) -> Iterator[Finished]:
    """Run jobs one after another, each from a cold cache and into a directory of its own.

    The engines start once, so the jobs must agree on their settings (ConfigError); their output
    goes to `logs`. A run with a failed request ends the sweep with EngineError: an engine that is
    gone would fail all that follow.
    """
    _check_alike(jobs)
    logs.mkdir(parents=True, exist_ok=True)
    first = jobs[0]
    progress.say(f"starting {len(first.arms)} engines: {', '.join(a.name for a in first.arms)}")
    with open_fleet(
        first.arms,
        lambda arm: launch(arm.name, first.engine(arm), logs / log_name(arm.name)),
        lambda name: progress.say(f"{name} is up"),
    ) as fleet:
        for job in jobs:
            for server in fleet.servers.values():
                server.reset()
            progress.say(f"{job.output.name}")
            done = Session(job, RunDirectory.create(job.output), fleet, progress).run()
            _check_complete(done)
            yield done


def _check_alike(jobs: Sequence[Job]) -> None:
    settings = [[job.engine(arm) for arm in job.arms] for job in jobs]
    if any(other != settings[0] for other in settings):
        raise ConfigError(
            "runs on the same engines need the same arms, model, pool and context",
            hint="fix kv_blocks, context and max_running for all of them",
        )


def _check_complete(done: Finished) -> None:
    if done.failed:
        raise EngineError(
            f"{done.failed} requests failed in {done.path}",
            hint="see error in its samples.jsonl, and logs/; the same command goes on from here",
        )
