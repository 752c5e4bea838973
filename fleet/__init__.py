"""The fleet as a whole: one worker's process, pools under Ray, a fleet on this host, the command."""
