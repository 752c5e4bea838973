// Attention over a paged pool: the parts that do not depend on how products are summed.
//
// Every query row is computed separately: keys in steps of 64 from position 0 (or from the step in
// which its window begins), one online softmax step for each, sums over head dims and over keys in
// a fixed order. So a row's bits depend on its own position and keys alone, not on the rest of its
// unit, chunk, or batch. A unit only shares the work of reading K and V.
//
//   rows of a unit: the queries of a KV head (G heads each) of up to kUnitQueries positions
//   K of 16 tokens  ->  pairs of dims by token                    both are operands of
//   V of 2 tokens   ->  pairs of tokens by dim (in lane order)    products of bf16 pairs
//   the weights of a step are rounded to bf16, and the rounded ones are summed

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "pages.h"
#include "vectors.h"

namespace baton {

constexpr int kMaxRows = 128;
constexpr int kUnitQueries = 32;

struct Call {
  const uint16_t* q;
  long q_stride;
  Pages pages;
  int group, window;
  float scale;
  uint16_t* out;
  long out_stride;
  const float* sinks;  // score of each head without a value, or null
};

struct Row {
  const uint16_t* q;
  uint16_t* out;
  int position;
  int first;  // first key that it sees
  float max;
  __m512 sum;
};

// Bits of the keys begin ... begin + 15 that lie in first ... last.
inline __mmask16 seen(int begin, int first, int last) {
  const int from = std::clamp(first - begin, 0, 16), upto = std::clamp(last - begin + 1, 0, 16);
  return static_cast<__mmask16>(((1u << upto) - 1u) & ~((1u << from) - 1u));
}

inline __m512 keep(uint16_t* to, __m512 weights) {
  store_bf16(to, weights);
  return load_bf16(to);
}
inline __m512 keep(float* to, __m512 weights) {
  const __m512 kept = rounded(weights);
  _mm512_store_ps(to, kept);
  return kept;
}

// Scores of one row in a step, and the largest so far.
inline float scale_scores(const Row& row, const __m512* found, int blocks, int begin, float scale,
                          __m512* scores) {
  const __m512 never = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const bool sees_all = row.first <= begin && row.position >= begin + blocks * kBlock - 1;
  __m512 most = never;
  for (int b = 0; b < blocks; ++b) {
    scores[b] = _mm512_mul_ps(found[b], _mm512_set1_ps(scale));
    if (!sees_all) {
      const __mmask16 mask = seen(begin + b * kBlock, row.first, row.position);
      scores[b] = _mm512_mask_mov_ps(never, mask, scores[b]);
    }
    most = _mm512_max_ps(most, scores[b]);
  }
  return std::max(row.max, _mm512_reduce_max_ps(most));
}

// Weights of these scores, and their sum, with the factor of the sums so far.
template <class W>
inline void take_weights(Row& row, const __m512* scores, int blocks, float max, float fix,
                         W* weights) {
  __m512 sum = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    const __m512 exact = exp_nonpositive(_mm512_sub_ps(scores[b], _mm512_set1_ps(max)));
    sum = _mm512_add_ps(sum, keep(weights + b * kBlock, exact));
  }
  row.max = max;
  row.sum = _mm512_fmadd_ps(row.sum, _mm512_set1_ps(fix), sum);
}

// One step of the online softmax of R rows: their weights, rounded to bf16 whatever type holds them,
// and the factors of the sums so far.
template <int R, class W>
inline void weigh(Row* rows, const __m512 (*found)[kStepBlocks], int blocks, int begin, float scale,
                  W (*weights)[kStep], float* fix) {
  __m512 scores[R][kStepBlocks];
  alignas(64) float falls[16] = {};
  float max[R];
  for (int r = 0; r < R; ++r) {
    max[r] = scale_scores(rows[r], found[r], blocks, begin, scale, scores[r]);
    falls[r] = rows[r].max - max[r];
  }
  _mm512_store_ps(falls, exp_nonpositive(_mm512_load_ps(falls)));  // all rows at once
  for (int r = 0; r < R; ++r) {
    fix[r] = falls[r];
    take_weights(rows[r], scores[r], blocks, max[r], fix[r], weights[r]);
  }
}

// Calls each(first, count, blocks) for the rows that see keys of a step, up to `most` at a time.
template <class F>
inline void by_groups(const Row* rows, int total, int most, int begin, const F& each) {
  for (int i = 0; i < total; i += most) {
    const int together = std::min(most, total - i);
    // positions never fall from row to row, nor do the first keys
    const int upto = rows[i + together - 1].position - begin;
    if (upto < 0 || rows[i].first >= begin + kStep) continue;
    each(i, together, std::min(kStepBlocks, upto / kBlock + 1));
  }
}

struct Unit {  // `count` queries of a span, and the query heads of `heads` KV heads
  const Span& span;
  int first, count, head, heads;
};

// Attention of a unit. `Sums` adds a step of keys to the rows of a KV head.
template <class Sums, int V>  // dim / 16
void attend(const Call& c, const Unit& unit) {
  constexpr int dim = V * 16;
  const Pages& pages = c.pages;
  const Span& span = unit.span;
  const PackFn pack = pack_of(pages.format);
  Row rows[kMaxRows];
  alignas(64) float sums[kMaxRows * dim];
  alignas(64) __m512i keys[kStepBlocks * dim / 2];
  alignas(64) __m512i values[kStep / 2 * V];
  Ahead ahead(pages.token_bytes,
              (unit.heads - 1) * pages.head_bytes + vector_bytes(pages.format, dim));
  const int of_head = unit.count * c.group, total = of_head * unit.heads;
  for (int i = 0; i < total; ++i) {
    const int query = unit.first + i % of_head / c.group;
    const int head = (unit.head + i / of_head) * c.group + i % c.group;
    Row& row = rows[i];
    row.q = c.q + (span.row + query) * c.q_stride + head * dim;
    row.out = c.out + (span.row + query) * c.out_stride + head * dim;
    row.position = span.start + query;
    row.first = c.window ? std::max(0, row.position - c.window + 1) : 0;
    row.max = c.sinks ? c.sinks[head] : std::numeric_limits<float>::lowest();
    row.sum = _mm512_maskz_mov_ps(c.sinks != nullptr, _mm512_set1_ps(1.0f));
  }
  const int padded = (total + 15) / 16 * 16;  // rows of whole tiles
  std::memset(sums, 0, sizeof(float) * padded * dim);
  const Sums by(rows, total, c.scale);
  const int last = rows[total - 1].position;
  for (int begin = rows[0].first / kStep * kStep; begin <= last; begin += kStep) {
    const bool in_place =
        of_head <= Sums::kInPlace && pages.format == kBf16 && begin + kStep <= last + 1;
    ahead.clear();
    for (int at = begin + kStep; !in_place && at < begin + 2 * kStep && at <= last; at += kBlock)
      ahead.add(pages.vectors(span, at, unit.head));
    for (int h = 0; h < unit.heads; ++h) {
      const int kv_head = unit.head + h;
      Row* const here = rows + h * of_head;
      float* const sums_here = sums + h * of_head * dim;
      if constexpr (Sums::kInPlace > 0) {
        if (in_place) {
          Vectors now[kStepBlocks], next[kStepBlocks];
          for (int b = 0; b < kStepBlocks; ++b) {
            const int at = begin + b * kBlock;
            now[b] = pages.vectors(span, at, kv_head);
            next[b] = pages.vectors(span, std::min(at + kStep, last), kv_head);
          }
          by.take_in_place(here, of_head, sums_here, now, next, pages.token_bytes, begin);
          continue;
        }
      }
      for (int b = 0; b < kStepBlocks; ++b) {
        const int at = begin + b * kBlock, valid = std::min(kBlock, last - at + 1);
        if (valid <= 0) {  // this block is used only with weights of zero
          std::memset(values + b * kBlock / 2 * V, 0, kBlock / 2 * V * sizeof(__m512i));
          continue;
        }
        pack(pages.vectors(span, at, kv_head), pages.token_bytes, valid, dim, keys + b * dim / 2,
             values + b * kBlock / 2 * V);
      }
      by.take_in(here, of_head, sums_here, keys, values, begin, ahead);
    }
  }
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // lane order to dims
  for (int i = 0; i < total; ++i) {
    const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(rows[i].sum));
    for (int d = 0; d < dim; d += 32) {
      const __m512 low = Sums::whole(_mm512_load_ps(sums + i * dim + d));
      const __m512 high = Sums::whole(_mm512_load_ps(sums + i * dim + d + 16));
      const __m512i both = narrow_two(_mm512_mul_ps(high, inverse), _mm512_mul_ps(low, inverse));
      _mm512_storeu_si512(rows[i].out + d, _mm512_permutexvar_epi64(order, both));
    }
  }
}

using AttendFn = void (*)(const Call&, const Unit&);

// The kernel for heads of `dim`, or null: with the sums of VDPBF16PS, or with those of tiles by FMA,
// by AMX, or in software.
AttendFn attend_by_pairs(int dim);
AttendFn attend_by_tiles(int dim, int tiles);

template <template <int> class Sums>
AttendFn attend_for(int dim) {
  switch (dim) {
    case 32: return attend<Sums<2>, 2>;
    case 64: return attend<Sums<4>, 4>;
    case 96: return attend<Sums<6>, 6>;
    case 128: return attend<Sums<8>, 8>;
    case 256: return attend<Sums<16>, 16>;
    default: return nullptr;
  }
}

}  // namespace baton
