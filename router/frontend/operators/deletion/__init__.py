"""Deletion of a tenant: its steps at one router, at all routers, and the receipt."""
