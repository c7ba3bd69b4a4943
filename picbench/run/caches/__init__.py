"""The declared state of the arms' caches: brought about, and verified from counters."""
