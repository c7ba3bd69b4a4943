"""The environment of an arm's process."""

import os

#: On at most so many cores one request's keys are not divided among threads.
_FEW_CORES = 2


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def arm_environment() -> dict[str, str]:
    """This process's environment, with defaults for what the user has not set.

    OpenMP threads wait asleep instead of spinning: measured on two cores with one busy neighbour,
    an arm of many small kernels takes 2.5 s instead of 32 s, and alone it takes no longer.

    Where vLLM's CPU attention divides a request's keys among threads, these spin until all of them
    have begun (`guard_counter` in csrc/cpu/cpu_attn_impl.hpp), whatever OpenMP is told: on two
    cores with busy neighbours a decode step takes 30 to 33 ms of CPU time instead of 18 to 19. Two
    threads have work enough without, as models have two KV heads or more.

    Files are text in UTF-8 whatever the locale is: torch reads some of its own as the locale says,
    and cannot be imported in one such as ja_JP.eucJP.
    """
    defaults = {"OMP_WAIT_POLICY": "passive", "PYTHONUTF8": "1"}
    if cores() <= _FEW_CORES:
        defaults["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    return defaults | dict(os.environ)


def quiet_engine() -> None:
    """For an engine in this process: leave the terminal to picbench, unless the user wants more."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name, value in arm_environment().items():
        os.environ.setdefault(name, value)
