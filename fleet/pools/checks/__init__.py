"""`baton doctor --address`: checks of the nodes of a cluster and of their connections."""
