"""Worker process, worker pools under Ray, the fleet on this host, and the ``baton`` command.

This package may import every other one.
"""
