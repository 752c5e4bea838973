"""Checks of a worker's engine by fixed prompts, at intervals and after a sleep."""
