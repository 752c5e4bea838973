"""Roles of a running fleet's workers: sizes that operators ask for, and the planner."""
