"""Issued API keys of a router: the table that requests use, and its exchange with Redis."""
