"""Usage of tenants: ledgers of routers and workers, and their sums in Redis."""
