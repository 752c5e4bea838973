// A team of threads that share the units of a job by claiming them, one after the other.
//
// The caller works too, and waits only for units that somebody else has begun: a helper that the
// operating system holds back costs nothing but its help. Helpers wait for the next job with open
// eyes for some microseconds, since the kernels of a step follow each other closely, and then sleep;
// so workers that share cores do not burn them. Which thread computes a unit changes no bit.

#pragma once

#include <cstdint>

namespace baton {

using Work = void (*)(const void* job, long unit);

// Calls work(job, u) for every u in [0, units), on up to `threads` threads, or fewer (``cores.h``).
void share(int threads, long units, Work work, const void* job);

template <class F>
void share(int threads, long units, const F& each) {
  share(
      threads, units, [](const void* job, long unit) { (*static_cast<const F*>(job))(unit); },
      &each);
}

}  // namespace baton
