// Shared by the kernels: vectors of 16 fp32, and bf16 as 16 bits.

#pragma once

#include <cstdint>

#include "avx512.h"

namespace baton {

inline __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 load_bf16(const uint16_t* from) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

#ifndef __AVX512BF16__
// The bf16 nearest to each value, in 32 bits.
inline __m512i nearest_bf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i carry = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  __m512i found = _mm512_srli_epi32(_mm512_add_epi32(bits, carry), 16);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  found = _mm512_mask_or_epi32(found, nan, high, _mm512_set1_epi32(0x40));
  const __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  return _mm512_mask_and_epi32(found, tiny, high, _mm512_set1_epi32(0x8000));
}
#endif

// Rounds to bf16, to nearest even; tiny values to zero, NaN quiet. VCVTNEPS2BF16, or its emulation.
inline __m256i narrow(__m512 values) {
#ifdef __AVX512BF16__
  const __m256bh halves = _mm512_cvtneps_pbh(values);
  return reinterpret_cast<const __m256i&>(halves);
#else
  return _mm512_cvtepi32_epi16(nearest_bf16(values));
#endif
}

// The same, in fp32.
inline __m512 rounded(__m512 values) {
#ifdef __AVX512BF16__
  return widen(narrow(values));
#else
  return _mm512_castsi512_ps(_mm512_slli_epi32(nearest_bf16(values), 16));
#endif
}

inline void store_bf16(uint16_t* to, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(values));
}

// 32 bf16, `low` first.
inline __m512i narrow_two(__m512 high, __m512 low) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
#endif
}

// Two values in every lane: an operand of `dot_pairs`. Without VDPBF16PS they are fp32, and loops that
// use values often have them as `Operand`, widened before.
#ifdef __AVX512BF16__
using Operand = uint16_t;
using Two = __m512i;
inline Two two(const uint16_t* from) {
  int32_t both;
  __builtin_memcpy(&both, from, 4);
  return _mm512_set1_epi32(both);
}
#else
using Operand = float;
struct Two {
  __m512 even, odd;
};
inline Two two(const float* from) { return {_mm512_set1_ps(from[0]), _mm512_set1_ps(from[1])}; }
inline Two two(const uint16_t* from) {
  int32_t both;
  __builtin_memcpy(&both, from, 4);
  const __m512i all = _mm512_set1_epi32(both);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(all, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(all, _mm512_set1_epi32(0xffff0000)))};
}
#endif

// sum + the products of the two bf16 of each lane, the odd one first, each added with one rounding.
// VDPBF16PS, or the same by two FMAs; those need a `FlushDenormals` around them for the same bits.
inline __m512 dot_pairs(__m512 sum, __m512i a, Two b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const __m512i odd = _mm512_and_si512(a, _mm512_set1_epi32(0xffff0000));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(odd), b.odd, sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), b.even, sum);
#endif
}

// During its lifetime, this thread's FMAs replace denormals by zeros, as VDPBF16PS always does.
class FlushDenormals {
#ifndef __AVX512BF16__
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#else
 public:
  FlushDenormals() {}  // not trivial, to avoid a warning about an unused variable
#endif
};

// exp(x) for x <= 0; 0 below the smallest normal number.
inline __m512 exp_nonpositive(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(f, f), p, _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
  const __m512 value = _mm512_scalef_ps(p, n);
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(value, tiny, _mm512_setzero_ps());
}

// 1 / (1 + exp(-x)), without overflow on either side.
inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = exp_nonpositive(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_div_ps(_mm512_mask_mov_ps(one, negative, e), _mm512_add_ps(one, e));
}

}  // namespace baton
