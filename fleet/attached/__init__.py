"""One process for all servers that somebody else has started: a worker of the fleet for each."""
