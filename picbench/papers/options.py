"""The flags of `picbench reproduce`; a file of its own, so that help loads no engines."""

from typing import Literal

from picbench.settings import Folder, SettingsModel, Share, setting


class ReproduceConfig(SettingsModel):
    """What is measured of a paper, or of trained models, and where it goes."""

    figures: tuple[str, ...] = setting(
        ("all",),
        "What to make, such as table2 or fig8; repeat the flag for more.",
        metavar="NAME",
        flag="--figure",
    )
    output: Folder | None = setting(
        None,
        "Where runs, data, tables and figures go; what is complete in it is not run again.",
        metavar="DIR",
        shown="runs/PAPER",
    )
    device: Literal["cpu", "cuda"] = setting(
        "cpu",
        "What engines run on; also decides sizes: the testbed's on a CPU, the paper's on a GPU.",
    )
    model: str | None = setting(None, "See picbench run.", metavar="NAME", shown="the paper's file")
    requests: int | None = setting(
        None, "Requests of every point; fewer is faster.", metavar="N", ge=1
    )
    seeds: int | None = setting(
        None, "Take only the first N seeds of the settings.", metavar="N", ge=1
    )
    settings: str | None = setting(None, "Other loads, arms and claims, in YAML.", metavar="FILE")
    models: str | None = setting(
        None,
        "accuracy: names on the hub, or folders.",
        metavar="ID,ID",
        shown="EPIC's three models",
    )
    rows: int | None = setting(
        None, "accuracy: of each set.", metavar="N", shown="the settings'", ge=2
    )
    data: str | None = setting(
        None, "accuracy: hub, bundled, DIR; see picbench run.", metavar="WHERE", shown="hub"
    )
    texts: str | None = setting(None, "accuracy: texts to hide needles in.", metavar="DIR")
    scores: Folder | None = setting(
        None,
        "Scores of picbench measure algorithms serve, instead of measuring them.",
        metavar="DIR",
    )
    seconds: float | None = setting(
        None, "Start nothing that would end later; the same command continues.", metavar="S", ge=0
    )
    commit: str | None = setting(
        None, "Name of the measured code, if this is not a checkout.", metavar="NAME"
    )
    part: Share = setting(
        (1, 1),
        "Measure the K-th of N shares; N processes, each on a GPU of its own, write the same "
        "output.",
        metavar="K/N",
        shown="all",
    )
    dry_run: bool = setting(False, "Say what is left to do and how long it may take.")
