"""What a run uses of the world; tests bring their own."""

from collections.abc import Callable
from dataclasses import dataclass

from picbench.arms.remote import launch
from picbench.inputs.inputs import load
from picbench.inputs.workload import Workload
from picbench.run.config import RunConfig
from picbench.run.session import Launch


@dataclass(frozen=True, slots=True)
class Services:
    """Where workloads come from and how engines start."""

    load: Callable[[RunConfig], Workload] = load
    launch: Launch = launch
