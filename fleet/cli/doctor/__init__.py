"""`baton doctor`: what is missing on this machine, between workers, on each node of a cluster."""
