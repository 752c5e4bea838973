"""The routers of one host that share a port, and what makes them look like one."""
