"""Routers of one host that share a port and answer as one."""
