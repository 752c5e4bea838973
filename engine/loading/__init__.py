"""From files to tensors in a fixed layout, and how much memory an engine takes. No backend here."""
