"""Request bodies, one file for each kind, and their validation."""
