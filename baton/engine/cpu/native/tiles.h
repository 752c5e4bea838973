// AMX tiles, by instructions and in software. The kernels are templates over either, so that their
// control flow is tested on machines without AMX too.
//
// TDPBF16PS computes, per element of C [rows, 16], with A [rows, 32] and B [16 pairs, 16, 2]:
//
//   even = odd = +0;  16 times:  even = fma(a[2 k], b[2 k], even), odd = fma(a[2 k + 1], b[2 k + 1], odd)
//   c += even + odd                              fp32, to nearest even, denormals are zeros
//
// A tile here always has 16 rows of 64 bytes.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace baton {

constexpr int kTileRows = 16;
constexpr long kTileBytes = 1024;
constexpr int kStepInputs = 32;  // of a tile product

// The instructions. GCC's own `_tile_loadd` names no memory operand, so a store to the memory that it
// reads may be moved after it: hence the clobbers.
struct HardwareTiles {
  // Requests tiles from the kernel; returns whether this process may use them.
  static bool permitted() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }

  HardwareTiles() {
    struct alignas(64) Shape {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) shape.bytes[tile] = 64, shape.rows[tile] = kTileRows;
    asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
  }
  ~HardwareTiles() { asm volatile("tilerelease" ::: "memory"); }  // idle threads hold no state

  template <int T>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  void load(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  void store(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

// During its lifetime, this thread's arithmetic replaces denormals by zeros, as tiles do.
class FlushAll {
 public:
  FlushAll() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80 | 0x8040); }
  ~FlushAll() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

// The same by scalars, for tests: slow, and written from the description above.
class SoftwareTiles {
 public:
  template <int T>
  void zero() {
    std::memset(tiles_[T], 0, kTileBytes);
  }
  template <int T>
  void load(const void* from, long stride) {
    for (int row = 0; row < kTileRows; ++row)
      std::memcpy(tiles_[T][row], static_cast<const char*>(from) + row * stride, 64);
  }
  template <int T>
  void store(void* to, long stride) {
    for (int row = 0; row < kTileRows; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tiles_[T][row], 64);
  }
  template <int C, int A, int B>
  void dot() {
    for (int row = 0; row < kTileRows; ++row)
      for (int column = 0; column < 16; ++column) {
        float even = 0, odd = 0;
        for (int pair = 0; pair < 16; ++pair) {
          const uint32_t a = tiles_[A][row][pair], b = tiles_[B][pair][column];
          even = std::fma(as_float(a << 16), as_float(b << 16), even);
          odd = std::fma(as_float(a & 0xffff0000), as_float(b & 0xffff0000), odd);
        }
        const float sum = as_float(tiles_[C][row][column]) + (even + odd);
        std::memcpy(&tiles_[C][row][column], &sum, 4);
      }
  }

 private:
  static float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  FlushAll flush_;
  uint32_t tiles_[8][kTileRows][16];
};

// Hides the origin of a pointer from the compiler. Operands that it would keep in registers for the
// next vector, spilling others, are then read again by the instruction that uses them.
template <class T>
inline void hide(T*& pointer) {
  asm volatile("" : "+r"(pointer));
}

// The even and the odd bf16 of each pair, as fp32.
inline __m512 even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

}  // namespace baton
