"""Which workers serve a request: the prefix index, the load that is booked, one cost in seconds."""
