"""Usage and cost of tenants: `baton usage`."""
