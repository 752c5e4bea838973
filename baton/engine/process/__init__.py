"""Step-loop process of an engine, and the worker shell's side of it."""
