"""Formats in which model families write tool calls."""
