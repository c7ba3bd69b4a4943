"""The scheduler's process: plans, chunk jobs, the block pool and its ledger."""
