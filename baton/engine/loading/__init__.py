"""From files to tensors, and how much memory an engine takes; no backend."""
