"""Ranks of a replica that have pools of their own."""
