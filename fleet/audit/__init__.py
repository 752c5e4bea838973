"""Audit entries of the controller, the supervisor and commands."""
