"""Pools of workers under Ray: the controller that keeps them at size, and what it asks of Ray."""
