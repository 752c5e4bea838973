// Hashes of a prompt's blocks: keyed BLAKE2b over (parent, tokens), and the seed's tag, as specified in
// baton/types/block_hashes.py and computed by hashlib. A block of 16 tokens takes one compression
// after the key's, which is the same for all.

#include <cstdint>
#include <cstring>

namespace {

constexpr uint64_t kStart[8] = {
    0x6A09E667F3BCC908ull, 0xBB67AE8584CAA73Bull, 0x3C6EF372FE94F82Bull, 0xA54FF53A5F1D36F1ull,
    0x510E527FADE682D1ull, 0x9B05688C2B3E6C1Full, 0x1F83D9ABFB41BD6Bull, 0x5BE0CD19137E2179ull};

constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

constexpr int kRounds = 12;
constexpr uint64_t kBlockBytes = 128, kHashBytes = 16, kTagBytes = 4;

uint64_t turned(uint64_t word, int by) { return word >> by | word << (64 - by); }

void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = turned(d ^ a, 32);
  c += d;
  b = turned(b ^ c, 24);
  a += b + y;
  d = turned(d ^ a, 16);
  c += d;
  b = turned(b ^ c, 63);
}

// `bytes` is the total with this block. Little-endian only, like all machines that run Baton.
void compress(uint64_t state[8], const uint8_t block[kBlockBytes], uint64_t bytes, bool last) {
  uint64_t word[16], v[16];
  std::memcpy(word, block, sizeof word);
  for (int i = 0; i < 8; ++i) {
    v[i] = state[i];
    v[i + 8] = kStart[i];
  }
  v[12] ^= bytes;
  if (last) v[14] = ~v[14];
#pragma GCC unroll 12  // so that the compiler knows the order of the words
  for (int round = 0; round < kRounds; ++round) {
    const uint8_t* at = kOrder[round % 10];
    mix(v[0], v[4], v[8], v[12], word[at[0]], word[at[1]]);
    mix(v[1], v[5], v[9], v[13], word[at[2]], word[at[3]]);
    mix(v[2], v[6], v[10], v[14], word[at[4]], word[at[5]]);
    mix(v[3], v[7], v[11], v[15], word[at[6]], word[at[7]]);
    mix(v[0], v[5], v[10], v[15], word[at[8]], word[at[9]]);
    mix(v[1], v[6], v[11], v[12], word[at[10]], word[at[11]]);
    mix(v[2], v[7], v[8], v[13], word[at[12]], word[at[13]]);
    mix(v[3], v[4], v[9], v[14], word[at[14]], word[at[15]]);
  }
  for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

extern "C" {

// `names` gets 16 bytes for each of `count` blocks of `block_bytes` packed tokens, at most 112.
// The key has 1 to 64 bytes, the seed 16.
void baton_block_names(const uint8_t* key, uint32_t key_bytes, const uint8_t* seed,
                       const uint8_t* tokens, uint64_t count, uint32_t block_bytes,
                       uint8_t* names) {
  uint64_t keyed[8];
  std::memcpy(keyed, kStart, sizeof keyed);
  keyed[0] ^= 0x01010000u ^ key_bytes << 8 ^ kHashBytes;  // fan-out 1, depth 1
  uint8_t block[kBlockBytes] = {};
  std::memcpy(block, key, key_bytes);
  compress(keyed, block, kBlockBytes, false);
  std::memset(block, 0, sizeof block);
  const uint8_t* parent = seed;
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t state[8];
    std::memcpy(state, keyed, sizeof state);
    std::memcpy(block, parent, kHashBytes);
    std::memcpy(block + kHashBytes, tokens + i * block_bytes, block_bytes);
    compress(state, block, kBlockBytes + kHashBytes + block_bytes, true);
    std::memcpy(names + i * kHashBytes, state, kHashBytes - kTagBytes);
    std::memcpy(names + (i + 1) * kHashBytes - kTagBytes, seed + kHashBytes - kTagBytes, kTagBytes);
    parent = names + i * kHashBytes;
  }
}

}  // extern "C"
