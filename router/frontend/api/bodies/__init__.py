"""The bodies of requests, one file for each kind, and how they are checked."""
