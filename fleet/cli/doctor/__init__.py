"""`baton doctor`: checks of this machine, of a fleet's edges, of a cluster's nodes."""
