"""Planner of the roles of workers: how many compute prompts, and how many generate."""
