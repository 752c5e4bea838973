"""Our own C++ kernels, compiled at install; ``engine/cpu`` also works without them."""
