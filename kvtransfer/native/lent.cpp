// Lent pages: copied from pages to pages, with one digest of the copy (kvtransfer/lent_pages.py).
#include <algorithm>

#include "kv.h"

namespace kv {
namespace {

// Bytes copied and hashed at a time, so few that reading and writing overlap. With tiles of
// 64 KiB, the memory waits for one to end before the other begins.
constexpr int64_t kTile = 1 << 10;

class Digest {
 public:
  explicit Digest(uint64_t seed) : state_(hash.create == nullptr ? nullptr : hash.create()) {
    if (state_ != nullptr) hash.reset(state_, seed);
  }
  ~Digest() {
    if (state_ != nullptr) hash.free(state_);
  }
  Digest(const Digest&) = delete;
  Digest& operator=(const Digest&) = delete;

  void update(const uint8_t* bytes, int64_t size) {
    if (state_ != nullptr) hash.update(state_, bytes, size);
  }
  uint64_t value() const { return state_ == nullptr ? 0 : hash.digest(state_); }

 private:
  void* state_;
};

// Calls `take(layer, kv, block, token, bytes)` for each run of a slice that is contiguous in every
// pool, in the slice's order; `follows(block)` returns whether a block's pages are next to those
// of the block before it.
template <typename Follows, typename Take>
void runs(const Pool& pool, const Slice& slice, Follows follows, Take take) {
  const bool all_heads = slice.head_count == pool.heads;
  const int64_t row_bytes = slice.head_count * pool.head_bytes;
  for (int64_t row = 0; row < int64_t(slice.layer_count) * 2; ++row) {
    const int64_t layer = slice.layer_begin + row / 2, kv = row % 2;
    for (int64_t block = 0; block < slice.block_count;) {
      int64_t end = block + 1;
      if (!all_heads) {
        const int64_t valid = slice.valid_in(block, pool.block_tokens);
        for (int64_t token = 0; token < valid; ++token) take(layer, kv, block, token, row_bytes);
      } else {
        while (end < slice.block_count && follows(end)) ++end;
        const int64_t tokens =
            (end - 1 - block) * pool.block_tokens + slice.valid_in(end - 1, pool.block_tokens);
        take(layer, kv, block, int64_t(0), tokens * row_bytes);
      }
      block = end;
    }
  }
}

}  // namespace
}  // namespace kv

extern "C" {

uint64_t baton_kv_digest(const kv::Pool* pool, const uint32_t* pages, const kv::Slice* slice,
                         uint64_t seed) {
  kv::Digest digest(seed);
  kv::runs(
      *pool, *slice, [&](int64_t block) { return pages[block] == pages[block - 1] + 1; },
      [&](int64_t layer, int64_t kv, int64_t block, int64_t token, int64_t size) {
        const uint8_t* from = pool->at(layer, kv, pages[block], slice->head_begin);
        digest.update(from + token * pool->token_bytes(), size);
      });
  return digest.value();
}

// Copies lent pages into ours. Each tile is copied into a private buffer, hashed there, and stored
// from there. So the stored bytes are those that were hashed, whatever the lender writes meanwhile.
// Returns 0 if they do not match the digest; then our pages are cleared.
int baton_kv_copy(const kv::Pool* source, const uint32_t* lent, const kv::Pool* target,
                  const uint32_t* ours, const kv::Slice* slice, uint64_t seed, uint64_t expected) {
  alignas(64) uint8_t tile[kv::kTile];
  kv::Digest digest(seed);
  const auto follows = [&](int64_t block) {
    return lent[block] == lent[block - 1] + 1 && ours[block] == ours[block - 1] + 1;
  };
  const auto place = [&](int64_t layer, int64_t kv, int64_t block, int64_t token) {
    return target->at(layer, kv, ours[block], slice->head_begin) + token * target->token_bytes();
  };
  kv::runs(*source, *slice, follows,
           [&](int64_t layer, int64_t kv, int64_t block, int64_t token, int64_t size) {
             const uint8_t* from = source->at(layer, kv, lent[block], slice->head_begin) +
                                   token * source->token_bytes();
             uint8_t* to = place(layer, kv, block, token);
             for (int64_t at = 0; at < size; at += kv::kTile) {
               const int64_t some = std::min(size - at, kv::kTile);
               std::memcpy(tile, from + at, some);
               kv::prefetch(from + at + some, std::min(size - at - some, kv::kTile));
               digest.update(tile, some);
               kv::store_past(to + at, tile, some);
             }
           });
  kv::stored_past();
  if (digest.value() == expected) return 1;
  kv::runs(*source, *slice, follows,
           [&](int64_t layer, int64_t kv, int64_t block, int64_t token, int64_t size) {
             std::memset(place(layer, kv, block, token), 0, size);
           });
  return 0;
}
}
