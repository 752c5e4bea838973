"""Checks before a fleet starts: the fleet file against this machine and its Redis."""
