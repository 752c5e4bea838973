"""Simulator: the fleet's own state machines under a virtual clock."""
