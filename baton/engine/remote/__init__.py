"""Engines behind HTTP: what all of them share."""
