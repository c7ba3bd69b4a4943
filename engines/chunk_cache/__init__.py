"""The chunk cache: a store of chunks over the KV pool, and the tiers below it."""
