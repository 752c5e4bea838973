"""KV transfers in C++: gather, hash, verify and scatter, in one call for each frame."""
