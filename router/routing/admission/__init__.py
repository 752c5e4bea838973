"""Queue and gate before placement."""
