"""Measure prompts and bodies of real length at each step of a ladder of sizes."""
