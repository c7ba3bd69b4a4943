"""What is said of arms that stalled: below tables, and where figures name an arm."""

from collections.abc import Iterator, Mapping

from picbench.output.summary import ArmSummary, labels_of


def stalled(arms: Mapping[str, ArmSummary]) -> Iterator[str]:
    """Arms that stalled, one a line."""
    for name, arm in arms.items():
        if arm.stalls is not None and arm.stalls.steps:
            yield (
                f"{name}: stalled in {arm.stalls.steps} steps, the longest of "
                f"{arm.stalls.longest_s:.1f} s; its own slowest steps allow "
                f"{arm.stalls.allowed_s:.1f} s"
            )


def figure_labels(arms: Mapping[str, ArmSummary]) -> dict[str, str]:
    """The names of arms in figures: what is simulated and what stalled says so."""
    labels = labels_of(arms)
    for name, arm in arms.items():
        if arm.stalls is not None and arm.stalls.steps:
            labels[name] += f" (stalled: {arm.stalls.steps} steps)"
    return labels
