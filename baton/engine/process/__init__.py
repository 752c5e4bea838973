"""The step loop as a process of its own, what is said to it, and the worker's handle on it."""
