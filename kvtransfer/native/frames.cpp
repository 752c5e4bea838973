// Frames in wire order (block, head, layer, k|v, token, bytes): gathered from a pool, or scattered.
#include <type_traits>

#include "kv.h"

namespace kv {

Hash hash = {};

namespace {

// The digest of one (block, head) is bound to its place: kvtransfer/chunk.py.
uint64_t leaf_digest(const Slice& slice, int64_t block, int64_t head, int64_t valid, uint64_t seed,
                     const uint8_t* bytes, int64_t size) {
  if (hash.whole == nullptr) return 0;
  const uint32_t place[3] = {uint32_t(slice.block_begin + block), uint32_t(slice.head_begin + head),
                             uint32_t(valid)};
  return hash.whole(bytes, size, hash.whole(place, sizeof place, seed));
}

// Calls `work` with the size of a vector as a constant if it is a usual one (otherwise 0), so that
// copying a vector takes a few instructions and no call.
template <typename Work>
void with_vector_bytes(int64_t size, Work work) {
  switch (size) {
    case 128: return work(std::integral_constant<int64_t, 128>());
    case 256: return work(std::integral_constant<int64_t, 256>());
    case 512: return work(std::integral_constant<int64_t, 512>());
    default: work(std::integral_constant<int64_t, 0>());
  }
}

// One block, in the order of the pool, which is fastest to read.
template <int64_t kFixed>
void gather_block(const Pool& pool, const Slice& slice, int64_t page, int64_t valid, uint8_t* out) {
  const int64_t size = kFixed ? kFixed : pool.head_bytes;
  const int64_t leaf = int64_t(slice.layer_count) * 2 * valid * size;
  for (int64_t row = 0; row < int64_t(slice.layer_count) * 2; ++row) {
    const uint8_t* from = pool.at(slice.layer_begin + row / 2, row % 2, page, slice.head_begin);
    for (int64_t token = 0; token < valid; ++token, from += pool.token_bytes()) {
      uint8_t* to = out + (row * valid + token) * size;
      for (int64_t head = 0; head < slice.head_count; ++head)
        std::memcpy(to + head * leaf, from + head * size, size);
    }
  }
}

template <int64_t kFixed>
void scatter_block(const Pool& pool, const Slice& slice, int64_t page, int64_t valid,
                   const uint8_t* in) {
  const int64_t size = kFixed ? kFixed : pool.head_bytes;
  const int64_t leaf = int64_t(slice.layer_count) * 2 * valid * size;
  for (int64_t row = 0; row < int64_t(slice.layer_count) * 2; ++row) {
    uint8_t* to = pool.at(slice.layer_begin + row / 2, row % 2, page, slice.head_begin);
    for (int64_t token = 0; token < valid; ++token, to += pool.token_bytes()) {
      const uint8_t* from = in + (row * valid + token) * size;
      for (int64_t head = 0; head < slice.head_count; ++head)
        store_past(to + head * size, from + head * leaf, size);
    }
  }
}

void wipe_block(const Pool& pool, const Slice& slice, int64_t page, int64_t valid) {
  for (int64_t row = 0; row < int64_t(slice.layer_count) * 2; ++row) {
    uint8_t* to = pool.at(slice.layer_begin + row / 2, row % 2, page, slice.head_begin);
    for (int64_t token = 0; token < valid; ++token, to += pool.token_bytes())
      std::memset(to, 0, slice.head_count * pool.head_bytes);
  }
}

}  // namespace
}  // namespace kv

extern "C" {

void baton_kv_hash(const kv::Hash* functions) { kv::hash = *functions; }

// Copies a slice out of the pool; each block is hashed while it is in the cache.
void baton_kv_gather(const kv::Pool* pool, const uint32_t* pages, const kv::Slice* slice,
                     uint64_t seed, uint8_t* out, uint64_t* digests) {
  const int64_t per_token = int64_t(slice->layer_count) * 2 * pool->head_bytes;
  for (int64_t block = 0; block < slice->block_count; ++block) {
    const int64_t valid = slice->valid_in(block, pool->block_tokens);
    kv::with_vector_bytes(pool->head_bytes, [&](auto fixed) {
      kv::gather_block<fixed.value>(*pool, *slice, pages[block], valid, out);
    });
    const int64_t leaf = per_token * valid;
    for (int64_t head = 0; head < slice->head_count; ++head, out += leaf)
      *digests++ = kv::leaf_digest(*slice, block, head, valid, seed, out, leaf);
  }
}

// Verifies each block of a payload and scatters it while it is in the cache. Returns 0 if a block
// does not match its digests; then neither it nor the blocks before it stay in the pool.
int baton_kv_scatter(const kv::Pool* pool, const uint32_t* pages, const kv::Slice* slice,
                     uint64_t seed, const uint8_t* payload, const uint64_t* digests) {
  const int64_t per_token = int64_t(slice->layer_count) * 2 * pool->head_bytes;
  for (int64_t block = 0; block < slice->block_count; ++block) {
    const int64_t valid = slice->valid_in(block, pool->block_tokens);
    const int64_t leaf = per_token * valid;
    for (int64_t head = 0; head < slice->head_count; ++head) {
      uint64_t expected;
      std::memcpy(&expected, digests++, sizeof expected);
      const uint8_t* bytes = payload + head * leaf;
      if (kv::leaf_digest(*slice, block, head, valid, seed, bytes, leaf) == expected) continue;
      kv::stored_past();
      while (block-- > 0) kv::wipe_block(*pool, *slice, pages[block], pool->block_tokens);
      return 0;
    }
    kv::with_vector_bytes(pool->head_bytes, [&](auto fixed) {
      kv::scatter_block<fixed.value>(*pool, *slice, pages[block], valid, payload);
    });
    payload += leaf * slice->head_count;
  }
  kv::stored_past();
  return 1;
}
}
