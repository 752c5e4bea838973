// Rows of activations as integers, for products with weights of few bits:
//
//   x = scale (d0 + d1 / 254)      a scale for each row, one or two digits of 8 bits for each input
//
// The second digit counts in parts of half of the first's last place.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "team.h"
#include "vectors.h"

namespace baton {

constexpr float kLevels = 127.0f;
constexpr float kDigit = 254.0f;
constexpr float kTiny = 1e-30f;

inline __mmask16 lanes(long left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

// Rows of bf16 or fp32, and their digits: [rows][digits][row_bytes()].
struct DigitRows {
  const void* x;
  long x_stride;  // elements
  bool is_bf16;
  long inputs;
  int digits;
  uint8_t* packed;
  float* scales;

  long row_bytes() const { return (inputs + 63) / 64 * 64; }

  __m512 input(long row, long at, __mmask16 mask) const {
    if (is_bf16) {
      const auto* from = static_cast<const uint16_t*>(x) + row * x_stride + at;
      return widen(_mm256_maskz_loadu_epi16(mask, from));
    }
    return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(x) + row * x_stride + at);
  }

  // Writes a row's digits, plus `shift`, and its scale.
  void quantise(long row, int shift) const {
    __m512 most = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (long i = 0; i < inputs; i += 16) {
      const __m512 values = input(row, i, lanes(inputs - i));
      nan |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
      most = _mm512_max_ps(most, _mm512_abs_ps(values));
    }
    const float scale = std::max(_mm512_reduce_max_ps(most) * (1.0f / kLevels), kTiny);
    scales[row] = nan ? std::nanf("") : scale;  // a row with NaN stays NaN
    uint8_t* to = packed + row * digits * row_bytes();
    const __m512 by = _mm512_set1_ps(scale);
    const __m512i added = _mm512_set1_epi32(shift);
    const auto byte = [added](__m512 whole) {
      return _mm512_cvtepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32(whole), added));
    };
    for (long i = 0; i < row_bytes(); i += 16) {
      const long left = std::max(0L, inputs - i);
      const __m512 values = _mm512_div_ps(input(row, i, lanes(left)), by);
      const __m512 high = rounded(values);
      _mm_store_si128(reinterpret_cast<__m128i*>(to + i), byte(high));
      if (digits == 1) continue;
      const __m512 rest = _mm512_sub_ps(values, high);
      const __m512 low = rounded(_mm512_mul_ps(rest, _mm512_set1_ps(kDigit)));
      _mm_store_si128(reinterpret_cast<__m128i*>(to + row_bytes() + i), byte(low));
    }
  }

 private:
  static __m512 rounded(__m512 values) {
    return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

// sums + the four products of each lane: unsigned digits or levels, by signed ones.
inline __m512i add_products(__m512i sums, __m512i without_sign, __m512i with_sign) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sums, without_sign, with_sign);
#else  // even and odd bytes apart: two products of 8 bits are too much for 16
  const __m512i even =
      _mm512_madd_epi16(_mm512_and_si512(without_sign, _mm512_set1_epi16(0xff)),
                        _mm512_srai_epi16(_mm512_slli_epi16(with_sign, 8), 8));
  const __m512i odd =
      _mm512_madd_epi16(_mm512_srli_epi16(without_sign, 8), _mm512_srai_epi16(with_sign, 8));
  return _mm512_add_epi32(sums, _mm512_add_epi32(even, odd));
#endif
}

// Divides a product: each(row, count, panel) for runs of at most `most` rows, of equal length. A
// unit has neighbouring panels, and only so many rows that they stay in the L2 cache.
template <class F>
void share_product(int threads, long panels, long rows, long most, const F& each) {
  constexpr long kUnitsPerThread = 4, kUnitRows = 96;
  const long run = std::max(1L, panels / (threads * kUnitsPerThread));
  const long runs = (panels + run - 1) / run;
  const long chunks = (rows + kUnitRows - 1) / kUnitRows;
  const long chunk = (rows + chunks - 1) / chunks;
  share(threads, runs * chunks, [&](long unit) {
    const long first = unit % runs * run, last = std::min(panels, first + run);
    const long begin = unit / runs * chunk, end = std::min(rows, begin + chunk);
    for (long panel = first; panel < last; ++panel)
      for (long row = begin; row < end;) {
        const long left = end - row, calls = (left + most - 1) / most;
        const long take = (left + calls - 1) / calls;
        each(row, take, panel);
        row += take;
      }
  });
}

}  // namespace baton
