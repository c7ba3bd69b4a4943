"""What a tier holds, looked up where it keeps it."""

from tier_faults import Far

from picbench.engines.chunk_cache.tiers.backends.disk import Disk
from picbench.engines.chunk_cache.tiers.backends.host import Host
from picbench.engines.chunk_cache.tiers.backends.redis import Redis
from picbench.engines.chunk_cache.tiers.tier import Tier


def held(tier: Tier) -> tuple[int, int]:
    """How many values there are, and their bytes; those that are being written included."""
    if isinstance(tier, Far):
        return held(tier.inner)
    if isinstance(tier, Disk):
        found = tier._index._connection.execute("SELECT objects, bytes FROM total").fetchone()
        return int(found[0]), int(found[1])
    if isinstance(tier, Redis):
        sizes = [tier._client.strlen(key) for key in tier._client.scan_iter(b"picbench:v:*")]
        return len(sizes), sum(sizes)
    assert isinstance(tier, Host)
    return len(tier._values), tier._bytes
