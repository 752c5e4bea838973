"""Shares of one router in the fleet's limits: running sequences and queued requests."""
