"""What a run uses of the world; tests bring their own."""

from collections.abc import Callable
from dataclasses import dataclass

from picbench.config import RunConfig
from picbench.remote import launch
from picbench.requests import load
from picbench.session import Launch
from picbench.workload import Workload


@dataclass(frozen=True, slots=True)
class Services:
    """Where workloads come from and how engines start."""

    load: Callable[[RunConfig], Workload] = load
    launch: Launch = launch
