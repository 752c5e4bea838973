"""The fleet's own machines under a virtual clock."""
