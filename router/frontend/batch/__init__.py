"""Files that tenants leave here, and batches: many requests, at the lowest priority, for later."""
