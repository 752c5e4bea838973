"""What a router delivers for each second of CPU time, beside its peer."""
