// Attention over a paged bf16 pool, for CPUs with AVX-512 BF16.
//
// Every query row is computed by itself: keys in steps of 64 from position 0 (or from the step in
// which its window begins), one online softmax step for each, sums over head dims and over keys in
// a fixed order. So a row's bits depend on its own position and keys alone, whatever shares its
// tile, its chunk, or its batch. A tile only shares the work of reading K and V.
//
//   rows of a tile: the queries of one KV head (G heads each) of up to kTileQueries positions
//   K of 16 tokens  ->  pairs of dims by token                    both are operands of
//   V of 2 tokens   ->  pairs of tokens by dim (in lane order)    VDPBF16PS
//   the weights of a step are rounded to bf16, and summed as rounded

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

using baton::dot_pairs;
using baton::exp_nonpositive;
using baton::narrow_two;
using baton::two;

constexpr int kBlock = 16;
constexpr int kStepBlocks = 4;
constexpr int kStep = kBlock * kStepBlocks;
constexpr int kMaxDim = 256;
constexpr int kMaxRows = 128;
constexpr int kTileQueries = 32;
constexpr int kTogether = 4;  // rows whose sums are in registers at once
constexpr int kStoreRows = 64;

struct Span {      // one sequence's queries
  int32_t row;     // of the first query in q and out
  int32_t start;   // its position
  int32_t count;   // how many
  int32_t table;   // where its block table begins in `tables`
};

struct Call {
  const uint16_t* q;
  long q_stride;
  const uint16_t* keys;  // of the pool
  const uint16_t* values;
  long token_stride, head_stride;
  const int32_t* tables;
  int group, window;
  float scale;
  uint16_t* out;
  long out_stride;

  long place(const Span& span, int position) const {
    const long block = tables[span.table + position / kBlock];
    return (block * kBlock + position % kBlock) * token_stride;
  }
};

struct Row {
  const uint16_t* q;
  uint16_t* out;
  int position;
  int first;  // first key that it sees
  float max;
  __m512 sum;
};

// K of 16 tokens, 32 dims: dword `pair` of every token side by side, for each of the 16 pairs.
inline void pack_keys(const uint16_t* keys, long token_stride, int valid, __m512i* packed) {
  __m512i r[16], s[16];
  for (int t = 0; t < 16; ++t)
    r[t] = t < valid ? _mm512_loadu_si512(keys + t * token_stride) : _mm512_setzero_si512();
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
}

// V of 16 tokens, 32 dims: dims of tokens 2 i and 2 i + 1 interleaved, in lane order.
inline void pack_values(const uint16_t* values, long token_stride, int valid, __m512i* packed,
                        int pair_stride) {
  for (int t = 0; t < kBlock; t += 2) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i a = t < valid ? _mm512_loadu_si512(values + t * token_stride) : zero;
    const __m512i b = t + 1 < valid ? _mm512_loadu_si512(values + (t + 1) * token_stride) : zero;
    packed[t / 2 * pair_stride] = _mm512_unpacklo_epi16(a, b);
    packed[t / 2 * pair_stride + 1] = _mm512_unpackhi_epi16(a, b);
  }
}

// Asks for the next step's K and V while this one's are computed, a few lines at a time: pages lie
// anywhere, so no hardware guesses them, and all at once they would wait for each other.
class Ahead {
 public:
  void clear() { next_ = end_ = 0; }

  void add(const uint16_t* tokens, long token_stride, int dim) {
    for (int t = 0; t < kBlock; ++t)
      for (int d = 0; d < dim; d += 32) lines_[end_++] = tokens + t * token_stride + d;
  }

  void fetch() {
    if (next_ == end_) return;
    for (int i = 0; i < kFetch; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(lines_[next_ + i]), _MM_HINT_T0);
    next_ += kFetch;
  }

 private:
  static constexpr int kFetch = 4;
  int next_ = 0, end_ = 0;
  const uint16_t* lines_[2 * kStep * kMaxDim / 32];
};

// Scores of R rows against B blocks; the sum over dims of a row has a fixed order.
template <int R, int B>
inline void scores(const Row* rows, const __m512i* keys, int pairs, Ahead& ahead,
                   __m512 found[][kStepBlocks]) {
  __m512 sums[R][B];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) sums[r][b] = _mm512_setzero_ps();
  const baton::FlushDenormals flush;
  for (int pair = 0; pair < pairs; ++pair) {
    ahead.fetch();
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512i q = two(rows[r].q + 2 * pair);
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
    for (int b = 0; b < B; ++b) found[r][b] = sums[r][b];
}

// Bits of the keys begin ... begin + 15 that lie in first ... last.
inline __mmask16 seen(int begin, int first, int last) {
  const int from = std::clamp(first - begin, 0, 16), upto = std::clamp(last - begin + 1, 0, 16);
  return static_cast<__mmask16>(((1u << upto) - 1u) & ~((1u << from) - 1u));
}

// One step of the online softmax of one row: its weights as bf16, and what the sums so far are
// multiplied by.
inline float weigh(Row& row, const __m512* found, int blocks, int begin, float scale,
                   uint16_t* weights) {
  const __m512 never = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 score[kStepBlocks], most = never;
  for (int b = 0; b < blocks; ++b) {
    const __mmask16 mask = seen(begin + b * kBlock, row.first, row.position);
    score[b] = _mm512_mask_mul_ps(never, mask, found[b], _mm512_set1_ps(scale));
    most = _mm512_max_ps(most, score[b]);
  }
  const float max = std::max(row.max, _mm512_reduce_max_ps(most));
  const float fix = _mm512_cvtss_f32(exp_nonpositive(_mm512_set1_ps(row.max - max)));
  __m512 sum = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    const __m512 exact = exp_nonpositive(_mm512_sub_ps(score[b], _mm512_set1_ps(max)));
    baton::store_bf16(weights + b * kBlock, exact);
    sum = _mm512_add_ps(sum, baton::load_bf16(weights + b * kBlock));
  }
  row.max = max;
  row.sum = _mm512_fmadd_ps(row.sum, _mm512_set1_ps(fix), sum);
  return fix;
}

// sums = sums * fix + weights @ V for R rows and C vectors of 16 dims each.
template <int R, int C>
inline void blend(float* sums, int row_stride, const float* fix, const uint16_t (*weights)[kStep],
                  const __m512i* values, int pair_stride, int pairs, Ahead& ahead) {
  __m512 acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      acc[r][c] =
          _mm512_mul_ps(_mm512_load_ps(sums + r * row_stride + 16 * c), _mm512_set1_ps(fix[r]));
  const baton::FlushDenormals flush;
  for (int pair = 0; pair < pairs; ++pair) {
    const __m512i* v = values + pair * pair_stride;
    ahead.fetch();
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512i w = two(weights[r] + 2 * pair);
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

// R rows against the keys of one step, of which `blocks` blocks concern them.
template <int V, int R>
inline void advance(Row* rows, float* sums, const __m512i* keys, const __m512i* values, int begin,
                    int blocks, float scale, Ahead& ahead) {
  constexpr int dim = V * 16, chunk = V < 4 ? V : V % 4 ? 2 : 4;
  __m512 found[R][kStepBlocks];
  switch (blocks) {
    case 1: scores<R, 1>(rows, keys, dim / 2, ahead, found); break;
    case 2: scores<R, 2>(rows, keys, dim / 2, ahead, found); break;
    case 3: scores<R, 3>(rows, keys, dim / 2, ahead, found); break;
    default: scores<R, 4>(rows, keys, dim / 2, ahead, found);
  }
  alignas(64) uint16_t weights[R][kStep];
  float fix[R];
  for (int r = 0; r < R; ++r)
    fix[r] = weigh(rows[r], found[r], blocks, begin, scale, weights[r]);
  for (int v = 0; v < V; v += chunk)
    blend<R, chunk>(sums + 16 * v, dim, fix, weights, values + v, V, blocks * kBlock / 2, ahead);
}

template <int V>  // dim / 16
void tile(const Call& c, const Span& span, int kv_head, int first, int count) {
  constexpr int dim = V * 16;
  Row rows[kMaxRows];
  alignas(64) float sums[kMaxRows * dim];
  alignas(64) __m512i keys[kStepBlocks * dim / 2];
  alignas(64) __m512i values[kStep / 2 * V];
  Ahead ahead;
  const int total = count * c.group;
  for (int i = 0; i < total; ++i) {
    const int query = first + i / c.group, head = kv_head * c.group + i % c.group;
    Row& row = rows[i];
    row.q = c.q + (span.row + query) * c.q_stride + head * dim;
    row.out = c.out + (span.row + query) * c.out_stride + head * dim;
    row.position = span.start + query;
    row.first = c.window ? std::max(0, row.position - c.window + 1) : 0;
    row.max = std::numeric_limits<float>::lowest();
    row.sum = _mm512_setzero_ps();
  }
  std::memset(sums, 0, sizeof(float) * total * dim);
  const int last = rows[total - 1].position;
  for (int begin = rows[0].first / kStep * kStep; begin <= last; begin += kStep) {
    for (int b = 0; b < kStepBlocks && begin + b * kBlock <= last; ++b) {
      const int at = begin + b * kBlock, valid = std::min(kBlock, last - at + 1);
      const long place = c.place(span, at) + kv_head * c.head_stride;
      for (int d = 0; d < dim; d += 32) {
        pack_keys(c.keys + place + d, c.token_stride, valid, keys + (b * dim + d) / 2);
        pack_values(c.values + place + d, c.token_stride, valid,
                    values + b * kBlock / 2 * V + d / 16, V);
      }
    }
    ahead.clear();
    for (int at = begin + kStep; at < begin + 2 * kStep && at <= last; at += kBlock) {
      const long place = c.place(span, at) + kv_head * c.head_stride;
      ahead.add(c.keys + place, c.token_stride, dim);
      ahead.add(c.values + place, c.token_stride, dim);
    }
    for (int i = 0; i < total;) {
      const int together = std::min(kTogether, total - i);
      // positions never fall from row to row, nor do the first keys
      const int upto = rows[i + together - 1].position - begin;
      if (upto < 0 || rows[i].first >= begin + kStep) {
        i += together;
        continue;
      }
      const int blocks = std::min(kStepBlocks, upto / kBlock + 1);
      float* at = sums + i * dim;
      switch (together) {
        case 1: advance<V, 1>(rows + i, at, keys, values, begin, blocks, c.scale, ahead); break;
        case 2: advance<V, 2>(rows + i, at, keys, values, begin, blocks, c.scale, ahead); break;
        case 3: advance<V, 3>(rows + i, at, keys, values, begin, blocks, c.scale, ahead); break;
        default: advance<V, 4>(rows + i, at, keys, values, begin, blocks, c.scale, ahead);
      }
      i += together;
    }
  }
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // lane order to dims
  for (int i = 0; i < total; ++i) {
    const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(rows[i].sum));
    for (int d = 0; d < dim; d += 32) {
      const __m512 low = _mm512_mul_ps(_mm512_load_ps(sums + i * dim + d), inverse);
      const __m512 high = _mm512_mul_ps(_mm512_load_ps(sums + i * dim + d + 16), inverse);
      const __m512i both = narrow_two(high, low);
      _mm512_storeu_si512(rows[i].out + d, _mm512_permutexvar_epi64(order, both));
    }
  }
}

using TileFn = void (*)(const Call&, const Span&, int, int, int);

TileFn tile_for(int dim) {
  switch (dim) {
    case 32: return tile<2>;
    case 64: return tile<4>;
    case 96: return tile<6>;
    case 128: return tile<8>;
    case 256: return tile<16>;
    default: return nullptr;
  }
}

struct Unit {  // some queries of a span
  int span, first, count;
};

// Cuts spans into pieces of at most `most` queries; the last of a span comes first: it has most
// keys, and begun early it lets the threads end together.
void cut(const Span* spans, int num_spans, int most, std::vector<Unit>& units) {
  for (int s = 0; s < num_spans; ++s)
    for (int first = (spans[s].count - 1) / most * most; first >= 0; first -= most)
      units.push_back(Unit{s, first, std::min(most, spans[s].count - first)});
}

long rows_of(const Span* spans, int num_spans) {
  long found = 0;
  for (int s = 0; s < num_spans; ++s) found += spans[s].count;
  return found;
}

}  // namespace

extern "C" int baton_attention_supports(int dim, int group) {
  return tile_for(dim) != nullptr && group >= 1 && group <= kMaxRows;
}

// Writes K and V of a step's rows, [K heads, dim] each, to their places in the pool. Strides count
// elements. `tables` holds block numbers; a block is 16 tokens.
extern "C" void baton_store(const uint16_t* new_keys, const uint16_t* new_values, long new_stride,
                            uint16_t* keys, uint16_t* values, long token_stride, long head_stride,
                            const int32_t* spans, int num_spans, const int32_t* tables,
                            int num_kv_heads, int dim, int threads) {
  Call call{};
  call.token_stride = token_stride;
  call.tables = tables;
  const auto* list = reinterpret_cast<const Span*>(spans);
  const auto copy = [&](const Span& span, int first, int count) {
    for (int i = first; i < first + count; ++i) {
      const long to = call.place(span, span.start + i), from = (span.row + i) * new_stride;
      for (int head = 0; head < num_kv_heads; ++head) {
        std::memcpy(keys + to + head * head_stride, new_keys + from + head * dim, 2 * dim);
        std::memcpy(values + to + head * head_stride, new_values + from + head * dim, 2 * dim);
      }
    }
  };
  static thread_local std::vector<Unit> units;
  units.clear();
  cut(list, num_spans, kStoreRows, units);
  const long bytes_worth_a_thread = 1 << 16;
  const bool small = 4L * num_kv_heads * dim * rows_of(list, num_spans) < bytes_worth_a_thread;
  const Unit* each = units.data();
  baton::share(small ? 1 : threads, units.size(), [&](long i) {
    copy(list[each[i].span], each[i].first, each[i].count);
  });
}

// Strides count elements. `window` is 0 for none.
extern "C" void baton_attention(const uint16_t* q, long q_stride, const uint16_t* keys,
                                const uint16_t* values, long token_stride, long head_stride,
                                const int32_t* spans, int num_spans, const int32_t* tables,
                                int num_heads, int num_kv_heads, int dim, int window, float scale,
                                uint16_t* out, long out_stride, int threads) {
  const int group = num_heads / num_kv_heads;
  const Call call{q,      q_stride, keys,   values, token_stride, head_stride,
                  tables, group,    window, scale,  out,          out_stride};
  const auto* list = reinterpret_cast<const Span*>(spans);
  const TileFn run = tile_for(dim);
  static thread_local std::vector<Unit> units;
  units.clear();
  cut(list, num_spans, std::max(1, std::min(kTileQueries, kMaxRows / group)), units);
  const Unit* each = units.data();
  baton::share(threads, static_cast<long>(units.size()) * num_kv_heads, [&](long i) {
    const Unit& unit = each[i / num_kv_heads];
    run(call, list[unit.span], static_cast<int>(i % num_kv_heads), unit.first, unit.count);
  });
}
