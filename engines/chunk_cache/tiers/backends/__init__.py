"""The tiers by kind: host memory, disk, Redis, LMCache, Mooncake."""
