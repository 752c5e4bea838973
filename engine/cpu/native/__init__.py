"""Our own C++ kernels, compiled at install; ``engine/cpu`` does without them where there are none."""
