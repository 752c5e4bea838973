"""`baton doctor --address`: what every node of a cluster has, and what there is between them."""
