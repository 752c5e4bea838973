"""What the routers of a fleet have a right to together: places at workers, places in the queue."""
