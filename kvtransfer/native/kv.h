// A KV pool, a slice of it, and the hash functions of both kinds of frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace kv {

// Layout of baton/types/geometry.py: [layer, k|v, block, token, head, bytes of a vector]. The pool
// may have only some of the model's heads, from first_head on; slices use the model's numbers.
struct Pool {
  uint8_t* bytes;
  int64_t blocks, block_tokens, heads, head_bytes, first_head;

  uint8_t* at(int64_t layer, int64_t kv, int64_t page, int64_t head) const {
    const int64_t row = (layer * 2 + kv) * blocks + page;
    return bytes + row * block_bytes() + (head - first_head) * head_bytes;
  }
  int64_t token_bytes() const { return heads * head_bytes; }
  int64_t block_bytes() const { return block_tokens * token_bytes(); }
};

// The bytes of KvSlice.packed() in kvtransfer/kv_slice.py.
struct Slice {
  uint32_t kv_group, layer_begin, layer_count, head_begin, head_count, block_begin, block_count,
      valid_tokens;

  int64_t valid_in(int64_t block, int64_t block_tokens) const {
    const int64_t left = valid_tokens - block * block_tokens;
    return left < block_tokens ? left : block_tokens;
  }
};

// xxh3-64, from the library inside the Python package. Without it all digests are 0.
struct Hash {
  uint64_t (*whole)(const void*, size_t, uint64_t seed);
  void* (*create)();
  int (*reset)(void*, uint64_t seed);
  int (*update)(void*, const void*, size_t);
  uint64_t (*digest)(const void*);
  int (*free)(void*);
};
extern Hash hash;

inline void prefetch(const uint8_t* bytes, int64_t size) {
  for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(bytes + at);
}

// Copies past the caches to memory that is not read soon: a line that is written whole need not be
// fetched first. `stored_past` must follow before another thread may read.
inline void store_past(uint8_t* to, const uint8_t* from, int64_t size) {
#if defined(__AVX__)
  const int64_t before = -reinterpret_cast<uintptr_t>(to) & 63;
  if (size < before + 64) {
    std::memcpy(to, from, size);
    return;
  }
  std::memcpy(to, from, before);
  int64_t at = before;
  for (; at + 64 <= size; at += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
#else
    for (int64_t half = at; half < at + 64; half += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + half),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half)));
#endif
  }
  std::memcpy(to + at, from + at, size - at);
#else
  std::memcpy(to, from, size);
#endif
}

inline void stored_past() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

}  // namespace kv
