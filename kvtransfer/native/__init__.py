"""Moves of KV in C++: gather, hash, verify and place, in one call for each frame."""
