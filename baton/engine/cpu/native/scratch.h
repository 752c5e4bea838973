// Memory that grows and is kept; `static thread_local` makes it a thread's own.

#pragma once

#include <cstddef>
#include <cstdlib>

namespace baton {

class Scratch {
 public:
  ~Scratch() { free(at_); }

  // Returns at least so many bytes, aligned to a cache line; the contents are lost.
  template <class T>
  T* take(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes > size_) {
      free(at_);
      size_ = (bytes + 4095) / 4096 * 4096;
      at_ = aligned_alloc(64, size_);
    }
    return static_cast<T*>(at_);
  }

 private:
  void* at_ = nullptr;
  size_t size_ = 0;
};

}  // namespace baton
