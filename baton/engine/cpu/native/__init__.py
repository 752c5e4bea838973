"""C++ kernels, compiled at install; ``baton/engine/cpu`` also works without them."""
