"""Tenants at one router: keys, limits, policies, usage."""
