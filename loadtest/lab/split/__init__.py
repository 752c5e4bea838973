"""Lab: the goodput of each split of a fleet, and of the planner that starts with wrong ones."""
