"""Rows of the real data sets from the Hugging Face hub, at a revision that is pinned."""

from picbench.workloads.sources.hub.archive import LONGBENCH, Archive, is_hub, parse
from picbench.workloads.sources.hub.hub_rows import Origin, hub_rows

__all__ = ["LONGBENCH", "Archive", "Origin", "hub_rows", "is_hub", "parse"]
