"""From files to tensors, and how much memory an engine takes. No backend: see ``engine/cpu``."""
