// Attention with the sums of VDPBF16PS, and the exported functions of attention (``attention.h``).

#include "attention.h"

#include <vector>

#include "kernels.h"
#include "team.h"

namespace baton {
namespace {

constexpr int kTogether = 4;                // rows whose sums are in registers at once,
constexpr int kScored = kIsAvx512 ? 4 : 1;  // for so many blocks

// The queries of R rows as operands.
template <int R, int D>
struct Queries {
#ifdef __AVX512BF16__
  explicit Queries(const Row* rows) {
    for (int r = 0; r < R; ++r) row[r] = rows[r].q;
  }
  const Operand* row[R];
#else
  explicit Queries(const Row* rows) {
    for (int r = 0; r < R; ++r)
      for (int d = 0; d < D; d += 16) _mm512_store_ps(row[r] + d, load_bf16(rows[r].q + d));
  }
  alignas(64) Operand row[R][D];
#endif
};

// Scores of R rows against B blocks; the sum over dims of a row has a fixed order.
template <int R, int B, int D>
inline void scores(const Queries<R, D>& queries, const __m512i* keys, Ahead& ahead,
                   __m512 found[][kStepBlocks], int block) {
  constexpr int pairs = D / 2;
  __m512 sums[R][B];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sums[r][b] = _mm512_setzero_ps();
  for (int pair = 0; pair < pairs; ++pair) {
    ahead.fetch();
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Two q = two(queries.row[r] + 2 * pair);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const __m512i k = _mm512_load_si512(keys + b * pairs + pair);
        sums[r][b] = dot_pairs(sums[r][b], k, q);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) found[r][block + b] = sums[r][b];
}

// sums = sums * fix + weights @ V for R rows and C vectors of 16 dims each.
template <int R, int C>
inline void blend(float* sums, int row_stride, const float* fix, const Operand (*weights)[kStep],
                  const __m512i* values, int pair_stride, int pairs, Ahead& ahead) {
  __m512 acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      acc[r][c] =
          _mm512_mul_ps(_mm512_load_ps(sums + r * row_stride + 16 * c), _mm512_set1_ps(fix[r]));
  for (int pair = 0; pair < pairs; ++pair) {
    const __m512i* v = values + pair * pair_stride;
    ahead.fetch();
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Two w = two(weights[r] + 2 * pair);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const __m512i both = _mm512_load_si512(v + c);
        acc[r][c] = dot_pairs(acc[r][c], both, w);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) _mm512_store_ps(sums + r * row_stride + 16 * c, acc[r][c]);
}

// Few rows use an operand once, so storing it would cost more than its products: these two read bf16
// where it lies. `next` is the same place of the next step.
// Scores of R rows against one block.
template <int R, int D>
inline void scores_in_place(const Queries<R, D>& queries, const uint8_t* keys, const uint8_t* next,
                            long token_bytes, __m512 (*found)[kStepBlocks], int block) {
  __m512 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  const FlushDenormals flush;
  for (int d = 0; d < D; d += 32) {
    __m512i k[kBlock];
    for (int t = 0; t < kBlock; ++t) _mm_prefetch(next + t * token_bytes + 2 * d, kNear);
    pack_keys<kBf16>(keys, token_bytes, kBlock, d, D, k);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        sums[r] = dot_pairs(sums[r], k[pair], two(queries.row[r] + d + 2 * pair));
  }
  for (int r = 0; r < R; ++r) found[r][block] = sums[r];
}

// As `blend`, with a whole step's V from byte `at` of each token.
template <int R, int C>
inline void blend_in_place(float* sums, int row_stride, const float* fix,
                           const Operand (*weights)[kStep], const Vectors* blocks,
                           const Vectors* next, long at, long token_bytes) {
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      acc[r][c] =
          _mm512_mul_ps(_mm512_load_ps(sums + r * row_stride + 16 * c), _mm512_set1_ps(fix[r]));
  const FlushDenormals flush;
  for (int token = 0; token < kStep; token += 2) {
    const long offset = token % kBlock * token_bytes + at;
    const uint8_t* v = blocks[token / kBlock].values + offset;
    const uint8_t* ahead = next[token / kBlock].values + offset;
#pragma GCC unroll 2
    for (int c = 0; c < C; c += 2) {
      _mm_prefetch(ahead + 32 * c, kNear);
      _mm_prefetch(ahead + token_bytes + 32 * c, kNear);
      const __m512i first = _mm512_loadu_si512(v + 32 * c);
      const __m512i second = _mm512_loadu_si512(v + token_bytes + 32 * c);
      const __m512i low = _mm512_unpacklo_epi16(first, second);
      const __m512i high = _mm512_unpackhi_epi16(first, second);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Two w = two(weights[r] + token);
        acc[r][c] = dot_pairs(acc[r][c], low, w);
        acc[r][c + 1] = dot_pairs(acc[r][c + 1], high, w);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_store_ps(sums + r * row_stride + 16 * c, acc[r][c]);
}

// See `attend`.
template <int V>
class PairSums {
 public:
  PairSums(const Row*, int, float scale) : scale_(scale) {}

  static __m512 whole(__m512 sum) { return sum; }

  void take_in(Row* rows, int total, float* sums, const __m512i* keys, const __m512i* values,
               int begin, Ahead& ahead) const {
    by_groups(rows, total, kTogether, begin, [&](int i, int together, int blocks) {
      Row* const group = rows + i;
      float* const at = sums + i * kDim;
      switch (together) {
        case 1: advance<1>(group, at, keys, values, begin, blocks, ahead); break;
        case 2: advance<2>(group, at, keys, values, begin, blocks, ahead); break;
        case 3: advance<3>(group, at, keys, values, begin, blocks, ahead); break;
        default: advance<4>(group, at, keys, values, begin, blocks, ahead);
      }
    });
  }

  static constexpr int kInPlace = kIsAvx512 ? kTogether : 0;  // rows that read K and V in place

  void take_in_place(Row* rows, int total, float* sums, const Vectors* blocks, const Vectors* next,
                     long token_bytes, int begin) const {
    switch (total) {
      case 1: advance_in_place<1>(rows, sums, blocks, next, token_bytes, begin); break;
      case 2: advance_in_place<2>(rows, sums, blocks, next, token_bytes, begin); break;
      case 3: advance_in_place<3>(rows, sums, blocks, next, token_bytes, begin); break;
      default: advance_in_place<4>(rows, sums, blocks, next, token_bytes, begin);
    }
  }

 private:
  static constexpr int kDim = V * 16, kChunk = kIsAvx512 ? (V < 4 || V % 4 ? 2 : 4) : 1;

  template <int R>
  void advance_in_place(Row* rows, float* sums, const Vectors* blocks, const Vectors* next,
                        long token_bytes, int begin) const {
    __m512 found[R][kStepBlocks];
    const Queries<R, kDim> queries(rows);
    for (int b = 0; b < kStepBlocks; ++b)
      scores_in_place<R>(queries, blocks[b].keys, next[b].keys, token_bytes, found, b);
    alignas(64) Operand weights[R][kStep];
    float fix[R];
    weigh<R>(rows, found, kStepBlocks, begin, scale_, weights, fix);
    for (int v = 0; v < V; v += kChunk)
      blend_in_place<R, kChunk>(sums + 16 * v, kDim, fix, weights, blocks, next, 32 * v,
                                token_bytes);
  }

  template <int R>
  static void score(const Queries<R, kDim>& queries, const __m512i* keys, int blocks, Ahead& ahead,
                    __m512 (*found)[kStepBlocks]) {
    const FlushDenormals flush;
    for (int done = 0; done < blocks; done += kScored) {
      const __m512i* const from = keys + done * kDim / 2;
      switch (std::min(kScored, blocks - done)) {
        case 1: scores<R, 1>(queries, from, ahead, found, done); break;
        case 2: scores<R, 2>(queries, from, ahead, found, done); break;
        case 3: scores<R, 3>(queries, from, ahead, found, done); break;
        default: scores<R, 4>(queries, from, ahead, found, done);
      }
    }
  }

  template <int R>
  void advance(Row* rows, float* sums, const __m512i* keys, const __m512i* values, int begin,
               int blocks, Ahead& ahead) const {
    __m512 found[R][kStepBlocks];
    const Queries<R, kDim> queries(rows);
    score(queries, keys, blocks, ahead, found);
    alignas(64) Operand weights[R][kStep];
    float fix[R];
    weigh<R>(rows, found, blocks, begin, scale_, weights, fix);
    const int pairs = blocks * kBlock / 2;
    const FlushDenormals flush;
    for (int v = 0; v < V; v += kChunk)
      blend<R, kChunk>(sums + 16 * v, kDim, fix, weights, values + v, V, pairs, ahead);
  }

  const float scale_;
};

}  // namespace

AttendFn attend_by_pairs(int dim) { return attend_for<PairSums>(dim); }

namespace {

constexpr int kStoreRows = 64;
constexpr long kUnitsPerThread = 4;

struct Part {  // some queries of a span
  int span, first, count;
};

// Cuts spans into pieces of at most `most` queries. The last piece of a span comes first: it has the
// most keys, and starting it early lets the threads end together.
void cut(const Span* spans, int num_spans, int most, std::vector<Part>& units) {
  for (int s = 0; s < num_spans; ++s)
    for (int first = (spans[s].count - 1) / most * most; first >= 0; first -= most)
      units.push_back(Part{s, first, std::min(most, spans[s].count - first)});
}

// By AVX2, which packs K and V of a head at a time, a unit has several KV heads: they lie beside each
// other, and reading a whole page takes less time than reading its parts. Those of one span are shared
// among the threads; of several, which may be unequal, if there are units enough.
int heads_of_a_unit(long units, int num_kv_heads, int threads, int sums) {
  if (kIsAvx512 || sums >= 0) return 1;
  if (units <= num_kv_heads) return (num_kv_heads + threads - 1) / threads;
  return std::clamp<long>(units / (kUnitsPerThread * threads), 1, num_kv_heads);
}

long rows_of(const Span* spans, int num_spans) {
  long found = 0;
  for (int s = 0; s < num_spans; ++s) found += spans[s].count;
  return found;
}

}  // namespace

extern "C" int baton_attention_supports(int dim, int group) {
  return attend_by_pairs(dim) != nullptr && group >= 1 && group <= kMaxRows;
}

// Stores K and V of a step's rows, [K heads, dim] of bf16 each, in their slots of the pool. Strides
// of new rows count elements, those of the pool count bytes.
extern "C" void baton_store(const uint16_t* new_keys, const uint16_t* new_values, long new_stride,
                            uint8_t* keys, uint8_t* values, long token_bytes, long head_bytes,
                            int format, const int32_t* spans, int num_spans, const int32_t* tables,
                            int num_kv_heads, int dim, int threads) {
  const Pages pages{keys, values, token_bytes, head_bytes, tables, format};
  const auto* list = reinterpret_cast<const Span*>(spans);
  const auto copy = [&](const Span& span, int first, int count) {
    for (int i = first; i < first + count; ++i) {
      const long to = pages.place(span, span.start + i), from = (span.row + i) * new_stride;
      for (int head = 0; head < num_kv_heads; ++head) {
        encode(format, new_keys + from + head * dim, dim, keys + to + head * head_bytes);
        encode(format, new_values + from + head * dim, dim, values + to + head * head_bytes);
      }
    }
  };
  static thread_local std::vector<Part> units;
  units.clear();
  cut(list, num_spans, kStoreRows, units);
  const long bytes_worth_a_thread = 1 << 16;
  const bool small = 4L * num_kv_heads * dim * rows_of(list, num_spans) < bytes_worth_a_thread;
  const Part* each = units.data();
  share(small ? 1 : threads, units.size(), [&](long i) {
    copy(list[each[i].span], each[i].first, each[i].count);
  });
}

// Strides of q and out count elements, those of the pool count bytes. `window` is 0 for none.
// `sums`: -1 for VDPBF16PS, else as for products by tiles. `sinks`: one for each head, or null.
extern "C" void baton_attention(const uint16_t* q, long q_stride, uint8_t* keys, uint8_t* values,
                                long token_bytes, long head_bytes, int format,
                                const int32_t* spans, int num_spans, const int32_t* tables,
                                int num_heads, int num_kv_heads, int dim, int window, float scale,
                                uint16_t* out, long out_stride, int threads, int sums,
                                const float* sinks) {
  const int group = num_heads / num_kv_heads;
  const Pages pages{keys, values, token_bytes, head_bytes, tables, format};
  const Call call{q, q_stride, pages, group, window, scale, out, out_stride, sinks};
  const auto* list = reinterpret_cast<const Span*>(spans);
  const AttendFn run = sums < 0 ? attend_by_pairs(dim) : attend_by_tiles(dim, sums);
  static thread_local std::vector<Part> units;
  units.clear();
  cut(list, num_spans, std::max(1, std::min(kUnitQueries, kMaxRows / group)), units);
  const Part* each = units.data();
  const int together = heads_of_a_unit(units.size() * num_kv_heads, num_kv_heads, threads, sums);
  const int groups = (num_kv_heads + together - 1) / together;
  share(threads, static_cast<long>(units.size()) * groups, [&](long i) {
    const Part& part = each[i / groups];
    const int begin = i % groups * together, end = std::min(num_kv_heads, begin + together);
    const int most = std::max(1, kMaxRows / (part.count * group));
    for (int head = begin; head < end; head += most)
      run(call, {list[part.span], part.first, part.count, head, std::min(most, end - head)});
  });
}

}  // namespace baton
