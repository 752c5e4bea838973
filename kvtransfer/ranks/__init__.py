"""Ranks of a replica that have separate pools."""
