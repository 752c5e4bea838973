"""The fleet file: its keys, their limits, and the errors about wrong ones. All may read it."""
