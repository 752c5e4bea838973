"""The fleet file: its keys, their limits, and what a wrong one is told. Everybody may read it."""
