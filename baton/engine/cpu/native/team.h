// A team of threads that take the units of a job, one after the other.
//
// The caller computes too, and waits only for units that another thread has begun. So a helper that
// the operating system suspends costs only its help. Helpers spin for some microseconds before the
// next job, since the kernels of a step follow each other closely, and then sleep, so that workers
// that share cores do not waste them. Bits do not depend on the thread that computes a unit.

#pragma once

#include <cstdint>

namespace baton {

using Work = void (*)(const void* job, long unit);

// Calls work(job, u) for every u in [0, units), on at most `threads` threads (``cores.h``).
void share(int threads, long units, Work work, const void* job);

template <class F>
void share(int threads, long units, const F& each) {
  share(
      threads, units, [](const void* job, long unit) { (*static_cast<const F*>(job))(unit); },
      &each);
}

}  // namespace baton
