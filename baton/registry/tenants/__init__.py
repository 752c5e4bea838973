"""Limits of tenants: their table in Redis, and the banks from which routers lease parts."""
