// Pages of a KV pool: addresses and format of a token's K and V, and the conversion of a step's keys
// to operands of products of bf16 pairs.
//
//   bf16         D values
//   int8, fp8    D bytes, and the vector's scale in fp32: see ``baton/engine/cpu/kv_codec.py``, which
//                has the same numbers

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace baton {

constexpr int kBlock = 16;
constexpr int kStepBlocks = 4;
constexpr int kStep = kBlock * kStepBlocks;
constexpr int kMaxDim = 256;

enum Format : int { kBf16 = 0, kInt8 = 1, kFp8 = 2 };

inline long vector_bytes(int format, int dim) { return format == kBf16 ? 2 * dim : dim + 4; }

struct Span {      // queries of one sequence
  int32_t row;     // of the first query in q and out
  int32_t start;   // its position
  int32_t count;   // number of queries
  int32_t table;   // offset of its block table in `tables`
};

// A block's K and V of one head.
struct Vectors {
  const uint8_t* keys;
  const uint8_t* values;
};

struct Pages {
  uint8_t* keys;
  uint8_t* values;
  long token_bytes, head_bytes;  // from one to the next
  const int32_t* tables;         // block numbers; a block is 16 tokens
  int format;

  long place(const Span& span, int position) const {
    const long block = tables[span.table + position / kBlock];
    return (block * kBlock + position % kBlock) * token_bytes;
  }

  Vectors vectors(const Span& span, int position, int head) const {
    const long at = place(span, position) + head * head_bytes;
    return {keys + at, values + at};
  }
};

// e4m3 of 16 bytes, by way of fp16, whose exponents cover it once they are shifted by 8.
inline __m512 widen_fp8(__m128i bytes) {
  const __m256i wide = _mm256_cvtepu8_epi16(bytes);
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
  const __m512 found = _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
  return _mm512_mul_ps(found, _mm512_set1_ps(256.0f));
}

// 32 dims of a stored vector, as bf16.
template <int F>
inline __m512i load_dims(const uint8_t* vector, int at, int dim) {
  if (F == kBf16) return _mm512_loadu_si512(vector + 2 * at);
  float scale;
  std::memcpy(&scale, vector + dim, 4);
  const auto part = [=](int offset) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(vector + at + offset));
    const __m512 values =
        F == kInt8 ? _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)) : widen_fp8(bytes);
    return _mm512_mul_ps(values, _mm512_set1_ps(scale));
  };
  return narrow_two(part(16), part(0));
}

// K of 16 tokens, 32 dims: dword `pair` of every token side by side, for each of the 16 pairs.
template <int F>
inline void pack_keys(const uint8_t* keys, long token_bytes, int valid, int at, int dim,
                      __m512i* packed) {
#ifdef BATON_HALVES  // 4 pairs of 8 tokens at a time: all of them do not fit into registers
  alignas(64) uint16_t copy[kBlock][32];
  const uint8_t* from = keys + 2 * at;
  if (F != kBf16 || valid < kBlock) {
    for (int t = 0; t < kBlock; ++t)
      _mm512_store_si512(copy[t], t < valid ? load_dims<F>(keys + t * token_bytes, at, dim)
                                            : _mm512_setzero_si512());
    from = reinterpret_cast<const uint8_t*>(copy);
    token_bytes = sizeof(copy[0]);
  }
  for (int half = 0; half < 2; ++half, from += 8 * token_bytes)
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __m256i r[4], s[4];  // 16 bytes of tokens t and t + 4
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t)
        r[t] = _mm256_loadu2_m128i(
            reinterpret_cast<const __m128i*>(from + (t + 4) * token_bytes) + part,
            reinterpret_cast<const __m128i*>(from + t * token_bytes) + part);
      for (int t = 0; t < 4; t += 2) {
        s[t] = _mm256_unpacklo_epi32(r[t], r[t + 1]);
        s[t + 1] = _mm256_unpackhi_epi32(r[t], r[t + 1]);
      }
      auto* const to = reinterpret_cast<__m256i*>(packed + 4 * part) + half;
      to[0] = _mm256_unpacklo_epi64(s[0], s[2]);
      to[2] = _mm256_unpackhi_epi64(s[0], s[2]);
      to[4] = _mm256_unpacklo_epi64(s[1], s[3]);
      to[6] = _mm256_unpackhi_epi64(s[1], s[3]);
    }
#else
  __m512i r[16], s[16];
  for (int t = 0; t < 16; ++t)
    r[t] = t < valid ? load_dims<F>(keys + t * token_bytes, at, dim) : _mm512_setzero_si512();
  for (int i = 0; i < 8; ++i) {
    s[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    s[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(s[4 * i], s[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(s[4 * i], s[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(s[4 * i + 1], s[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(s[4 * i + 1], s[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    packed[i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88);
    packed[i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd);
    packed[i + 4] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88);
    packed[i + 12] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd);
  }
#endif
}

// V of 16 tokens, 32 dims: dims of tokens 2 i and 2 i + 1 interleaved, in lane order.
template <int F>
inline void pack_values(const uint8_t* values, long token_bytes, int valid, int at, int dim,
                        __m512i* packed, int pair_stride) {
  for (int t = 0; t < kBlock; t += 2) {
    const __m512i zero = _mm512_setzero_si512();
    const uint8_t* from = values + t * token_bytes;
    const __m512i a = t < valid ? load_dims<F>(from, at, dim) : zero;
    const __m512i b = t + 1 < valid ? load_dims<F>(from + token_bytes, at, dim) : zero;
    packed[t / 2 * pair_stride] = _mm512_unpacklo_epi16(a, b);
    packed[t / 2 * pair_stride + 1] = _mm512_unpackhi_epi16(a, b);
  }
}

// The cache to prefetch into. On Zen 3 prefetching into L1 takes longer, on Zen 4 more than twice as long;
// on Zen 5, which has AVX-VNNI, prefetching into L2 alone takes up to 1.6 times as long.
#if !defined(__AVX512F__) || defined(__AMX_TILE__) || \
    (defined(__AVX512BF16__) && !defined(__AVXVNNI__))
constexpr auto kNear = _MM_HINT_T1;
#else
constexpr auto kNear = _MM_HINT_T0;
#endif

// Prefetches the next step's K and V during this one's computation: pages lie anywhere, so no hardware
// predicts them, and all at once they would wait for each other. By AVX-512 a call prefetches a
// token's, by AVX2, where a step has more calls, a line. `bytes` are those of a token's heads.
class Ahead {
 public:
  Ahead(long token_bytes, long bytes) : token_bytes_(token_bytes), bytes_(bytes) {}

  void clear() { count_ = next_ = line_ = 0; }
  void add(Vectors block) {
    for (long token = 0; token < kBlock; ++token) {
      runs_[count_++] = block.keys + token * token_bytes_;
      runs_[count_++] = block.values + token * token_bytes_;
    }
  }

  void fetch() {
    if (next_ == count_) return;
    if (kIsAvx512) {
      for (int i = 0; i < 2; ++i, ++next_)
        for (long line = 0; line < bytes_; line += 64) _mm_prefetch(runs_[next_] + line, kNear);
      return;
    }
    _mm_prefetch(runs_[next_] + line_, kNear);
    line_ += 64;
    if (line_ < bytes_) return;
    line_ = 0;
    ++next_;
  }

 private:
  const long token_bytes_, bytes_;
  const uint8_t* runs_[2 * kStep];
  int count_ = 0, next_ = 0;
  long line_ = 0;  // of the next run, by AVX2
};

// K and V of a block, of which `valid` tokens are used, as operands.
template <int F>
void pack(Vectors from, long token_bytes, int valid, int dim, __m512i* packed_keys,
          __m512i* packed_values) {
  for (int d = 0; d < dim; d += 32) {
    pack_keys<F>(from.keys, token_bytes, valid, d, dim, packed_keys + d / 2);
    pack_values<F>(from.values, token_bytes, valid, d, dim, packed_values + d / 16, dim / 16);
  }
}

using PackFn = void (*)(Vectors, long, int, int, __m512i*, __m512i*);

inline PackFn pack_of(int format) {
  return format == kInt8 ? pack<kInt8> : format == kFp8 ? pack<kFp8> : pack<kBf16>;
}

// The byte of e4m3 next to each value, of which none is greater than 448; ties to even.
inline __m128i narrow_fp8(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __m512 size = _mm512_abs_ps(values);
  const __m512i plain = _mm512_castps_si512(size);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(plain, 20), _mm512_set1_epi32(1));
  const __m512i carry = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(plain, carry), 20);
  const __m512i normal = _mm512_sub_epi32(rounded, _mm512_set1_epi32((127 - 7) << 3));
  const __m512i small = _mm512_cvtps_epi32(_mm512_mul_ps(size, _mm512_set1_ps(512.0f)));
  const __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
  const __m512i found = _mm512_mask_mov_epi32(normal, is_small, small);
  return _mm512_cvtepi32_epi8(_mm512_or_si512(found, sign));
}

// Stores a vector of bf16. One with NaN or infinity has a scale of NaN or infinity.
inline void encode(int format, const uint16_t* vector, int dim, uint8_t* to) {
  if (format == kBf16) {
    std::memcpy(to, vector, 2 * dim);
    return;
  }
  __m512 most = _mm512_setzero_ps();
  __mmask16 nan = 0;
  for (int d = 0; d < dim; d += 16) {
    const __m512 values = load_bf16(vector + d);
    nan |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    most = _mm512_max_ps(most, _mm512_abs_ps(values));
  }
  const float largest = format == kInt8 ? 127.0f : 448.0f;
  const float exact = std::max(_mm512_reduce_max_ps(most) * (1.0f / largest), 1e-20f);
  const __m512 scale = widen(narrow(_mm512_set1_ps(nan ? std::nanf("") : exact)));
  const __m512 limit = _mm512_set1_ps(largest);
  for (int d = 0; d < dim; d += 16) {
    __m512 values = _mm512_div_ps(load_bf16(vector + d), scale);
    values = _mm512_min_ps(limit, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), values));
    const __m128i bytes = format == kInt8 ? _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(values))
                                          : narrow_fp8(values);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), bytes);
  }
  const float stored = _mm512_cvtss_f32(scale);
  std::memcpy(to + dim, &stored, 4);
}

}  // namespace baton
