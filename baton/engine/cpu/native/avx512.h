// The intrinsics of AVX-512 that the kernels use: the CPU's own, or the same by AVX2 in two halves.
//
// The second ones have the same bits. They stand in this namespace under the same names, so that the
// kernels, which are in it as well, find them first.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace baton {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
constexpr bool kIsAvx512 = true;
#else
constexpr bool kIsAvx512 = false;

#define BATON_HALVES inline __attribute__((always_inline))

struct alignas(64) __m512 {
  __m256 low, high;
};
struct alignas(64) __m512i {
  __m256i low, high;
};

// A lane's bits are all set, or none.
struct __mmask16 {
  __m256i low, high;

  BATON_HALVES __mmask16(__m256i low_lanes, __m256i high_lanes) : low(low_lanes), high(high_lanes) {}
  BATON_HALVES __mmask16(unsigned bits) {
    const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i upper = _mm256_slli_epi32(place, 8), all = _mm256_set1_epi32(bits);
    low = _mm256_cmpeq_epi32(_mm256_and_si256(all, place), place);
    high = _mm256_cmpeq_epi32(_mm256_and_si256(all, upper), upper);
  }
  BATON_HALVES __mmask16& operator|=(__mmask16 other) {
    low = _mm256_or_si256(low, other.low);
    high = _mm256_or_si256(high, other.high);
    return *this;
  }
  BATON_HALVES unsigned bits() const {
    const unsigned upper = _mm256_movemask_ps(_mm256_castsi256_ps(high));
    return upper << 8 | _mm256_movemask_ps(_mm256_castsi256_ps(low));
  }
  BATON_HALVES explicit operator bool() const { return bits() != 0; }
};

// ---- the same operation on both halves

#define BATON_ONE(type, name, by) \
  BATON_HALVES type name(type a) { return {by(a.low), by(a.high)}; }
#define BATON_TWO(type, name, by) \
  BATON_HALVES type name(type a, type b) { return {by(a.low, b.low), by(a.high, b.high)}; }
#define BATON_THREE(name, by)                                    \
  BATON_HALVES __m512 name(__m512 a, __m512 b, __m512 c) {       \
    return {by(a.low, b.low, c.low), by(a.high, b.high, c.high)}; \
  }
#define BATON_SHIFT(name, by) \
  BATON_HALVES __m512i name(__m512i a, int bits) { return {by(a.low, bits), by(a.high, bits)}; }
#define BATON_TURN(to, from, name, by) \
  BATON_HALVES to name(from a) { return {by(a.low), by(a.high)}; }
#define BATON_ALL(to, from, name, by)                  \
  BATON_HALVES to name(from value) {                   \
    return {by(value), by(value)}; \
  }

BATON_ALL(__m512, float, _mm512_set1_ps, _mm256_set1_ps)
BATON_ALL(__m512i, int, _mm512_set1_epi32, _mm256_set1_epi32)
BATON_ALL(__m512i, short, _mm512_set1_epi16, _mm256_set1_epi16)
BATON_ALL(__m512i, char, _mm512_set1_epi8, _mm256_set1_epi8)
BATON_HALVES __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
BATON_HALVES __m512i _mm512_setzero_si512() {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
BATON_TWO(__m512, _mm512_add_ps, _mm256_add_ps)
BATON_TWO(__m512, _mm512_sub_ps, _mm256_sub_ps)
BATON_TWO(__m512, _mm512_mul_ps, _mm256_mul_ps)
BATON_TWO(__m512, _mm512_div_ps, _mm256_div_ps)
BATON_TWO(__m512, _mm512_min_ps, _mm256_min_ps)
BATON_TWO(__m512, _mm512_max_ps, _mm256_max_ps)
BATON_THREE(_mm512_fmadd_ps, _mm256_fmadd_ps)
BATON_THREE(_mm512_fnmadd_ps, _mm256_fnmadd_ps)
BATON_THREE(_mm512_fmaddsub_ps, _mm256_fmaddsub_ps)
BATON_ONE(__m512, _mm512_moveldup_ps, _mm256_moveldup_ps)
BATON_ONE(__m512, _mm512_movehdup_ps, _mm256_movehdup_ps)
BATON_TWO(__m512i, _mm512_add_epi32, _mm256_add_epi32)
BATON_TWO(__m512i, _mm512_sub_epi32, _mm256_sub_epi32)
BATON_TWO(__m512i, _mm512_and_si512, _mm256_and_si256)
BATON_TWO(__m512i, _mm512_or_si512, _mm256_or_si256)
BATON_TWO(__m512i, _mm512_xor_si512, _mm256_xor_si256)
BATON_TWO(__m512i, _mm512_madd_epi16, _mm256_madd_epi16)
BATON_TWO(__m512i, _mm512_unpacklo_epi16, _mm256_unpacklo_epi16)
BATON_TWO(__m512i, _mm512_unpackhi_epi16, _mm256_unpackhi_epi16)
BATON_TWO(__m512i, _mm512_unpacklo_epi32, _mm256_unpacklo_epi32)
BATON_TWO(__m512i, _mm512_unpackhi_epi32, _mm256_unpackhi_epi32)
BATON_TWO(__m512i, _mm512_unpacklo_epi64, _mm256_unpacklo_epi64)
BATON_TWO(__m512i, _mm512_unpackhi_epi64, _mm256_unpackhi_epi64)
BATON_SHIFT(_mm512_slli_epi32, _mm256_slli_epi32)
BATON_SHIFT(_mm512_srli_epi32, _mm256_srli_epi32)
BATON_SHIFT(_mm512_srli_epi16, _mm256_srli_epi16)
BATON_SHIFT(_mm512_slli_epi16, _mm256_slli_epi16)
BATON_SHIFT(_mm512_srai_epi16, _mm256_srai_epi16)
BATON_TURN(__m512, __m512i, _mm512_castsi512_ps, _mm256_castsi256_ps)
BATON_TURN(__m512i, __m512, _mm512_castps_si512, _mm256_castps_si256)
BATON_TURN(__m512, __m512i, _mm512_cvtepi32_ps, _mm256_cvtepi32_ps)
BATON_TURN(__m512i, __m512, _mm512_cvtps_epi32, _mm256_cvtps_epi32)

#undef BATON_ONE
#undef BATON_TWO
#undef BATON_THREE
#undef BATON_SHIFT
#undef BATON_TURN
#undef BATON_ALL

BATON_HALVES __m512 _mm512_abs_ps(__m512 a) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
BATON_HALVES __m512 _mm512_roundscale_ps(__m512 a, int) {  // to the nearest integer
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, nearest), _mm256_round_ps(a.high, nearest)};
}
BATON_HALVES __m512 _mm512_permute_ps(__m512 a, int) {  // 0xb1: neighbours
  return {_mm256_permute_ps(a.low, 0xb1), _mm256_permute_ps(a.high, 0xb1)};
}
// a 2^n, of results without denormals.
BATON_HALVES __m512 _mm512_scalef_ps(__m512 a, __m512 n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_mul_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
}

// ---- memory; masks of 16-bit lanes are those of the first ones

BATON_HALVES __m512 _mm512_loadu_ps(const float* at) {
  return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}
BATON_HALVES __m512 _mm512_load_ps(const float* at) {
  return {_mm256_load_ps(at), _mm256_load_ps(at + 8)};
}
BATON_HALVES void _mm512_storeu_ps(float* at, __m512 a) {
  _mm256_storeu_ps(at, a.low);
  _mm256_storeu_ps(at + 8, a.high);
}
BATON_HALVES void _mm512_store_ps(float* at, __m512 a) {
  _mm256_store_ps(at, a.low);
  _mm256_store_ps(at + 8, a.high);
}
BATON_HALVES __m512i _mm512_loadu_si512(const void* at) {
  const auto* halves = static_cast<const __m256i*>(at);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
BATON_HALVES __m512i _mm512_load_si512(const void* at) {
  const auto* halves = static_cast<const __m256i*>(at);
  return {_mm256_load_si256(halves), _mm256_load_si256(halves + 1)};
}
BATON_HALVES void _mm512_storeu_si512(void* at, __m512i a) {
  auto* halves = static_cast<__m256i*>(at);
  _mm256_storeu_si256(halves, a.low);
  _mm256_storeu_si256(halves + 1, a.high);
}
BATON_HALVES void _mm512_store_si512(void* at, __m512i a) { _mm512_storeu_si512(at, a); }

BATON_HALVES __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* at) {
  if (mask == ~0u) return _mm512_loadu_si512(at);
  alignas(64) uint16_t lanes[32] = {};
  std::memcpy(lanes, at, 2 * _mm_popcnt_u32(mask));
  return _mm512_load_si512(lanes);
}
BATON_HALVES void _mm512_mask_storeu_epi16(void* at, __mmask32 mask, __m512i a) {
  if (mask == ~0u) return _mm512_storeu_si512(at, a);
  std::memcpy(at, &a, 2 * _mm_popcnt_u32(mask));
}
BATON_HALVES __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* at) {
  const unsigned bits = mask.bits();
  if (bits == 0xffff) return _mm256_loadu_si256(static_cast<const __m256i*>(at));
  return _mm512_maskz_loadu_epi16(bits, at).low;
}
BATON_HALVES void _mm256_mask_storeu_epi16(void* at, __mmask16 mask, __m256i a) {
  std::memcpy(at, &a, 2 * _mm_popcnt_u32(mask.bits()));
}
BATON_HALVES __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* at) {
  return {_mm256_maskload_ps(at, mask.low), _mm256_maskload_ps(at + 8, mask.high)};
}
BATON_HALVES void _mm512_mask_storeu_ps(float* at, __mmask16 mask, __m512 a) {
  _mm256_maskstore_ps(at, mask.low, a.low);
  _mm256_maskstore_ps(at + 8, mask.high, a.high);
}

// ---- masks

// `by`: less (_CMP_LT_OQ), or not comparable (_CMP_UNORD_Q).
BATON_HALVES __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int by) {
  const auto compare = [by](__m256 x, __m256 y) {
    return _mm256_castps_si256(by == _CMP_LT_OQ ? _mm256_cmp_ps(x, y, _CMP_LT_OQ)
                                                : _mm256_cmp_ps(x, y, _CMP_UNORD_Q));
  };
  return {compare(a.low, b.low), compare(a.high, b.high)};
}
BATON_HALVES __mmask16 _mm512_testn_epi32_mask(__m512i a, __m512i b) {
  const __m512i both = _mm512_and_si512(a, b);
  const __m256i zero = _mm256_setzero_si256();
  return {_mm256_cmpeq_epi32(both.low, zero), _mm256_cmpeq_epi32(both.high, zero)};
}
BATON_HALVES __m512i _mm512_mask_mov_epi32(__m512i other, __mmask16 mask, __m512i a) {
  return {_mm256_blendv_epi8(other.low, a.low, mask.low),
          _mm256_blendv_epi8(other.high, a.high, mask.high)};
}
BATON_HALVES __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 a) {
  return {_mm256_blendv_ps(other.low, a.low, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(other.high, a.high, _mm256_castsi256_ps(mask.high))};
}
BATON_HALVES __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) {
  return _mm512_mask_mov_ps(_mm512_setzero_ps(), mask, a);
}
BATON_HALVES __m512 _mm512_mask_mul_ps(__m512 other, __mmask16 mask, __m512 a, __m512 b) {
  return _mm512_mask_mov_ps(other, mask, _mm512_mul_ps(a, b));
}
BATON_HALVES __m512i _mm512_mask_or_epi32(__m512i other, __mmask16 mask, __m512i a, __m512i b) {
  return _mm512_mask_mov_epi32(other, mask, _mm512_or_si512(a, b));
}
BATON_HALVES __m512i _mm512_mask_and_epi32(__m512i other, __mmask16 mask, __m512i a, __m512i b) {
  return _mm512_mask_mov_epi32(other, mask, _mm512_and_si512(a, b));
}
BATON_HALVES __mmask32 bits_of_16(__m256i low, __m256i high) {
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
  return static_cast<__mmask32>(_mm256_movemask_epi8(bytes));
}
BATON_HALVES __mmask32 _mm512_cmpeq_epi16_mask(__m512i a, __m512i b) {
  return bits_of_16(_mm256_cmpeq_epi16(a.low, b.low), _mm256_cmpeq_epi16(a.high, b.high));
}
BATON_HALVES __mmask32 _mm512_cmpgt_epi16_mask(__m512i a, __m512i b) {
  return bits_of_16(_mm256_cmpgt_epi16(a.low, b.low), _mm256_cmpgt_epi16(a.high, b.high));
}
BATON_HALVES __mmask32 _mm512_cmpeq_epi32_mask(__m512i a, __m512i b) {
  const __m512i other = _mm512_xor_si512(a, b);
  return _mm512_testn_epi32_mask(other, other).bits();
}

// ---- lanes of other widths and places

BATON_HALVES __m512i _mm512_castsi256_si512(__m256i low) { return {low, _mm256_setzero_si256()}; }
BATON_HALVES __m512i _mm512_inserti64x4(__m512i a, __m256i half, int) { return {a.low, half}; }
BATON_HALVES float _mm512_cvtss_f32(__m512 a) { return _mm256_cvtss_f32(a.low); }
BATON_HALVES __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
          _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}
BATON_HALVES __m512i _mm512_cvtepi8_epi16(__m256i a) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(a)),
          _mm256_cvtepi8_epi16(_mm256_extracti128_si256(a, 1))};
}
BATON_HALVES __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return {_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(a, a))};
}
BATON_HALVES __m512 _mm512_cvtph_ps(__m256i a) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}
BATON_HALVES __m256i _mm512_cvtepi32_epi16(__m512i a) {
  const __m512i kept = _mm512_and_si512(a, _mm512_set1_epi32(0xffff));
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(kept.low, kept.high), 0xd8);
}
BATON_HALVES __m128i _mm512_cvtepi32_epi8(__m512i a) {
  const __m256i wide = _mm512_cvtepi32_epi16(_mm512_and_si512(a, _mm512_set1_epi32(0xff)));
  return _mm_packus_epi16(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
// `lanes` is 0x88, the first and third quarters of each, or 0xdd, the others.
BATON_HALVES __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int lanes) {
  const auto two = [lanes](__m512i x) {
    return lanes == 0x88 ? _mm256_permute2x128_si256(x.low, x.high, 0x20)
                         : _mm256_permute2x128_si256(x.low, x.high, 0x31);
  };
  return {two(a), two(b)};
}
BATON_HALVES __m512i _mm512_setr_epi64(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e,
                                       int64_t f, int64_t g, int64_t h) {
  return {_mm256_setr_epi64x(a, b, c, d), _mm256_setr_epi64x(e, f, g, h)};
}
BATON_HALVES __m512i _mm512_permutexvar_epi64(__m512i order, __m512i a) {
  alignas(64) int64_t places[8], from[8], to[8];
  _mm512_store_si512(places, order);
  _mm512_store_si512(from, a);
  for (int i = 0; i < 8; ++i) to[i] = from[places[i]];
  return _mm512_load_si512(to);
}

// Lanes are combined with those 8, 4, 2 and 1 places further, as by GCC's reductions of AVX-512.
template <class F4, class F1>
BATON_HALVES float reduced(__m256 eight, const F4& four, const F1& one) {
  const __m128 upper = _mm256_extractf128_ps(eight, 1);
  const __m128 quarter = four(upper, _mm256_castps256_ps128(eight));
  const __m128 pair = four(quarter, _mm_movehl_ps(quarter, quarter));
  return one(_mm_cvtss_f32(pair), _mm_cvtss_f32(_mm_movehdup_ps(pair)));
}
BATON_HALVES float _mm512_reduce_add_ps(__m512 a) {
  return reduced(
      _mm256_add_ps(a.low, a.high), [](__m128 x, __m128 y) { return _mm_add_ps(x, y); },
      [](float x, float y) { return x + y; });
}
BATON_HALVES float _mm512_reduce_max_ps(__m512 a) {
  return reduced(
      _mm256_max_ps(a.high, a.low), [](__m128 x, __m128 y) { return _mm_max_ps(x, y); },
      [](float x, float y) { return x > y ? x : y; });
}
BATON_HALVES int _mm512_reduce_add_epi32(__m512i a) {
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi32(a.low, a.high));
  int sum = 0;
  for (const int32_t lane : lanes) sum += lane;
  return sum;
}
#endif

}  // namespace baton
