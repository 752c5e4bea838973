"""Keys, limits, usage, audit and deletion of tenants: what is neither HTTP nor placement."""
