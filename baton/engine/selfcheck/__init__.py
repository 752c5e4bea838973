"""Measurement of this host's engine for `baton doctor`."""
