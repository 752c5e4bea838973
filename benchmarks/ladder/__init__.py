"""Measurements of prompts and bodies of real length, over a ladder of sizes."""
