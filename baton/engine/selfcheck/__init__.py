"""Measurements of this host's engine that production runs: `baton doctor` and `roles: auto`."""
