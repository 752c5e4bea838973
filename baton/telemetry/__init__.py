"""Metrics, the page they are read from, and traces. Nothing is global."""
