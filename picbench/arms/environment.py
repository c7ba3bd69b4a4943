"""The environment of an arm's process."""

import os


def arm_environment() -> dict[str, str]:
    """This process's environment, with defaults for what the user has not set.

    OpenMP threads wait asleep instead of spinning: measured on two cores with one busy neighbour,
    an arm of many small kernels takes 2.5 s instead of 32 s, and alone it takes no longer.
    """
    return {"OMP_WAIT_POLICY": "passive"} | dict(os.environ)


def quiet_engine() -> None:
    """For an engine in this process: leave the terminal to picbench, unless the user wants more."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name, value in arm_environment().items():
        os.environ.setdefault(name, value)
