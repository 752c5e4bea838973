"""Command group `baton models`."""
