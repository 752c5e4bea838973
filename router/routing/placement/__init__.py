"""Choice of workers for a request: prefix index, booked load, one cost in seconds."""
