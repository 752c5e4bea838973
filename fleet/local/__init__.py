"""A fleet on this host: the supervisor and the processes that it starts."""
