// See team.h.

#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "cores.h"

namespace baton {
namespace {

constexpr int kMaxHelpers = 63;
constexpr int kSpins = 2000;           // about 40 us
constexpr long kMaxUnits = (1 << 20) - 1;

// One word has the current job and its next unit, so that a late helper can never take a unit of
// another job: generation (24 bits), units (20), next unit (20).
constexpr uint64_t kNext = (1u << 20) - 1;
inline uint64_t units_of(uint64_t word) { return (word >> 20) & kNext; }
inline uint64_t generation_of(uint64_t word) { return word >> 40; }

class Team {
 public:
  void run(int threads, long units, Work work, const void* job) {
    std::unique_lock<std::mutex> only(busy_, std::try_to_lock);
    if (!only.owns_lock() || units > kMaxUnits) {  // another thread of this process has the team
      for (long unit = 0; unit < units; ++unit) work(job, unit);
      return;
    }
    const int helpers = std::min<long>({threads - 1, units - 1, kMaxHelpers});
    while (started_ < helpers) start(started_++);
    work_ = work;
    job_ = job;
    if (wanted_.exchange(helpers) < static_cast<uint32_t>(helpers)) wake(wanted_);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t generation = (generation_of(word_.load()) + 1) & ((1u << 24) - 1);
    word_.store(generation << 40 | static_cast<uint64_t>(units) << 20);
    ticket_.fetch_add(1);
    if (sleepers_.load() > 0) wake(ticket_);
    take(generation);
    for (int spins = 0; done_.load(std::memory_order_acquire) != units;) {
      if (++spins < kSpins)
        _mm_pause();
      else
        sched_yield();  // the helper with the last unit may need this core
    }
  }

 private:
  // Takes and computes units of one job until none is left.
  void take(uint64_t generation) {
    uint64_t word = word_.load(std::memory_order_acquire);
    while (generation_of(word) == generation && (word & kNext) < units_of(word)) {
      if (!word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) continue;
      work_(job_, static_cast<long>(word & kNext));
      done_.fetch_add(1, std::memory_order_release);
      word = word_.load(std::memory_order_acquire);
    }
  }

  void start(uint32_t number) {
    std::thread([this, number] {
      while (true) {
        const uint32_t seen = ticket_.load();
        if (const uint32_t wanted = wanted_.load(); number >= wanted) {
          sleep(wanted_, wanted);  // parked: only jobs that need it wake it
          continue;
        }
        take(generation_of(word_.load()));
        wait(seen);
      }
    }).detach();
  }

  // Returns when there is another job than the one at ticket `seen`.
  void wait(uint32_t seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (ticket_.load(std::memory_order_acquire) != seen) return;
      _mm_pause();
    }
    sleepers_.fetch_add(1);
    while (ticket_.load() == seen) sleep(ticket_, seen);
    sleepers_.fetch_sub(1);
  }

  static void sleep(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, kMaxHelpers, nullptr, nullptr, 0);
  }

  std::mutex busy_;
  int started_ = 0;
  Work work_ = nullptr;
  const void* job_ = nullptr;
  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<uint32_t> ticket_{0};
  std::atomic<uint32_t> wanted_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<long> done_{0};
};

}  // namespace

void share(int threads, long units, Work work, const void* job) {
  threads = allowed(threads);
  if (threads <= 1 || units <= 1) {
    for (long unit = 0; unit < units; ++unit) work(job, unit);
    return;
  }
  static Team* const team = new Team;  // never destroyed, since the helpers never end
  team->run(threads, units, work, job);
}

}  // namespace baton
