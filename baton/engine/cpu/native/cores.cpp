// See cores.h; ``baton/engine/cpu/cores.py`` has the table and clears the entries of dead workers.

#include "cores.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

constexpr int kPlaces = 64;

struct Sharing {
  std::atomic<uint16_t>* claims;  // cores in use of each worker
  int place, own, cores, most;
};

std::atomic<const Sharing*> sharing{nullptr};

}  // namespace

namespace baton {

int allowed(int threads) {
  const Sharing* const s = sharing.load(std::memory_order_acquire);
  if (s == nullptr || threads <= 1) return threads;
  int claimed = 0, computing = 0, before = 0;
  for (int i = 0; i < kPlaces; ++i) {
    const int claim = s->claims[i].load(std::memory_order_relaxed);
    claimed += claim;
    computing += claim > 0;
    before += claim > 0 && i < s->place;
  }
  // A worker that does not mark its cores as in use borrows none.
  const bool am_computing = s->claims[s->place].load(std::memory_order_relaxed) > 0;
  const int idle = am_computing ? std::max(0, s->cores - claimed) : 0;
  const int borrowed = idle == 0 ? 0 : idle / computing + (before < idle % computing);
  return std::min({threads, s->own + borrowed, s->most});
}

}  // namespace baton

// From now on this process has `own` of the host's `cores`, borrows others up to `most` threads, and
// marks its cores in `claims`; null ends that. Call this while no job runs.
extern "C" void baton_cores_join(uint16_t* claims, int place, int own, int cores, int most) {
  auto* const table = reinterpret_cast<std::atomic<uint16_t>*>(claims);
  delete sharing.exchange(table ? new Sharing{table, place, own, cores, most} : nullptr);
}

// Marks the cores as in use (1) or lends them (0).
extern "C" void baton_cores_claim(int is_computing) {
  const Sharing* const s = sharing.load();
  if (s != nullptr) s->claims[s->place].store(is_computing ? s->own : 0);
}

// Threads for which jobs are cut; `own` without sharing.
extern "C" int baton_threads(int own) {
  const Sharing* const s = sharing.load(std::memory_order_acquire);
  return s == nullptr ? own : std::max(own, s->most);
}

// Those of them that a job would use now.
extern "C" int baton_threads_now(int own) { return baton::allowed(baton_threads(own)); }
