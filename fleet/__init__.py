"""The fleet: one worker's process, pools under Ray, a fleet on this host, the command.

``loadtest/`` and everything else stands below.
"""
