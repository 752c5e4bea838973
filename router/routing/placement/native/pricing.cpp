// Prices every worker for one prompt, and pairs of the best; see pricing.py beside this folder.
//
// The same sums in the same order as cost.py, in doubles and without contraction, so that both give
// the same bits. Whole numbers stay below 2^53.

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int kPaired = 6, kSources = 4, kLinks = 3;
constexpr double kClearlyFaster = 2.0;

// Report of one worker; `Row` in pricing.py has the same fields.
struct BatonRow {
  double queued_tokens, queued_context, streams, answering;
  double room_blocks, total_blocks, token_s, context_s;
  double step_s, block_bytes, block_tokens, format;
  double is_decode, unmeasured_bytes_per_s;
  double base_s, row_s, row_context_s;  // of a decode step: DecodeLine
  double answering_context, coming_context;
};

// One prompt and the constants of cost.py; `Prompt` in pricing.py has the same fields.
struct BatonPrompt {
  double prompt_tokens, expected_tokens, choices, moves_kv;
  double crowding_prefill, crowding_decode;
  double prefill_overhead_s, edge_overhead_s, exposed_share;
  double sources;
  double source_blocks[kSources];  // that each source has, the largest first
  double source_overhead_s[kSources];
};

struct Best {  // the smallest few; equal ones in the order of their arrival
  double own_s[kPaired];
  int32_t worker[kPaired];
  int count = 0;

  void offer(double value, int32_t candidate) {
    if (count == kPaired && value >= own_s[count - 1]) return;
    int at = count < kPaired ? count++ : count - 1;
    for (; at > 0 && own_s[at - 1] > value; --at) {
      own_s[at] = own_s[at - 1];
      worker[at] = worker[at - 1];
    }
    own_s[at] = value;
    worker[at] = candidate;
  }
};

struct Computed {
  double tokens, seconds;
};

// Tokens to compute after the held blocks, and the time for them.
Computed compute(const BatonRow* row, double prompt_tokens, double overhead_s, double held_blocks) {
  double held = held_blocks * row->block_tokens, most = prompt_tokens - 1;
  double known = held < most ? held : most, tokens = prompt_tokens - known;
  double context = tokens * (known + prompt_tokens - 1) / 2;  // tokens before each, in all
  return {tokens, overhead_s + (tokens * row->token_s + context * row->context_s)};
}

double whole_up(double value, double by) { return std::ceil(value / by); }

}  // namespace

extern "C" {

struct BatonPulled {
  double wire_s, rest_s;  // the rest is computed; infinite if no chain is worth it
};

// The chain of chain.py that brings blocks after `held` and makes the whole prompt cheapest.
// `pulls` is 1 if any edge was measured, followed by bytes/s from each source; 0: the usual rate.
static BatonPulled baton_pull(const BatonRow* row, const BatonPrompt* prompt, const double* pulls, double held,
                              double compute_s) {
  double blocks[kSources], link_rate[kSources], overhead_s[kSources], least_s[kSources];
  int ends = 0, sources = static_cast<int>(prompt->sources);
  for (int k = 0; k < sources; ++k) {
    double rate = pulls[0] != 0 && pulls[1 + k] != 0 ? pulls[1 + k] : row->unmeasured_bytes_per_s;
    double begins_s = prompt->source_overhead_s[k];
    bool is_quicker = ends == 0 || rate > link_rate[ends - 1] * kClearlyFaster || begins_s < overhead_s[ends - 1];
    if (!(prompt->source_blocks[k] > held) || !is_quicker) continue;
    blocks[ends] = prompt->source_blocks[k];
    link_rate[ends] = rate;
    overhead_s[ends] = begins_s;
    ++ends;
  }
  auto link_s = [&](int end, double before) {
    return overhead_s[end] + (blocks[end] - before) * row->block_bytes / link_rate[end];
  };
  for (int end = 0; end < ends; ++end) least_s[end] = link_s(end, held);
  for (int link = 1; link < (kLinks < ends ? kLinks : ends); ++link)
    for (int end = 0; end < ends; ++end)  // those after `end` still have one link less
      for (int before = end + 1; before < ends; ++before) {
        double seconds = least_s[before] + link_s(end, blocks[before]);
        if (seconds < least_s[end]) least_s[end] = seconds;
      }
  BatonPulled best = {0, INFINITY};
  for (int end = 0; end < ends; ++end) {
    double rest_s = compute(row, prompt->prompt_tokens, prompt->prefill_overhead_s, blocks[end]).seconds;
    if (least_s[end] + rest_s < compute_s) {
      compute_s = least_s[end] + rest_s;
      best = {least_s[end], rest_s};
    }
  }
  return best;
}

// Computes for each worker the cost alone, and the two halves of the cost in a pair.
// `halves` gets, for each format, six prefill and six decode workers, -1 if there are fewer.
// `tiers` has, for each worker, the blocks in pool and tiers, and the time to bring them back;
// `pulls` has the measured edges from the sources to it (baton_pull).
// The scan begins at `first`, so that among equals not always the same are paired. If `again` names
// workers, only these are priced, and the others keep their prices of the previous call.
void baton_price_workers(const BatonRow* rows, uint32_t count, const BatonPrompt* prompt,
                         const double* booked, const double* cached, const double* tiers, const double* pulls,
                         int32_t avoid, uint32_t first, uint32_t formats, double* alone_s, double* prompts, double* answers,
                         int32_t* halves, const int32_t* again, uint32_t again_count) {
  for (uint32_t step = 0; step < (again_count > 0 ? again_count : count); ++step) {
    uint32_t i = again_count > 0 ? static_cast<uint32_t>(again[step]) : step;
    if (static_cast<int32_t>(i) == avoid) {
      alone_s[i] = INFINITY;
      continue;
    }
    const BatonRow* row = rows + i;
    const double* more = booked + static_cast<size_t>(i) * 4;
    double token_s = row->token_s, context_s = row->context_s, step_s = row->step_s;
    double streams = row->streams + more[2];
    double delayed = row->answering + more[2];
    if (streams < 0) streams = 0;  // more ended than the report showed
    if (delayed < 0) delayed = 0;

    double queued_tokens = row->queued_tokens + more[0];
    double queued_context = row->queued_context + more[1];
    if (queued_tokens < 0) queued_tokens = 0;  // likewise computed
    if (queued_context < 0) queued_context = 0;
    double queue_s = queued_tokens * token_s + queued_context * context_s;
    double compute_s = compute(row, prompt->prompt_tokens, prompt->prefill_overhead_s, cached[i]).seconds;
    double bring_s = 0, held = cached[i], in_tiers = tiers[2 * static_cast<size_t>(i)];
    if (in_tiers > held) {
      double tier_s = tiers[2 * static_cast<size_t>(i) + 1];
      double rest_s = compute(row, prompt->prompt_tokens, prompt->prefill_overhead_s, in_tiers).seconds;
      if (tier_s + rest_s < compute_s) {
        compute_s = rest_s;
        bring_s = tier_s;
        held = in_tiers;
      }
    }
    double pull_s = 0;
    if (prompt->sources > 0 && prompt->source_blocks[0] > held) {
      BatonPulled pulled = baton_pull(row, prompt, pulls + static_cast<size_t>(i) * (1 + kSources), held, compute_s);
      if (pulled.rest_s < INFINITY) {
        compute_s = pulled.rest_s;
        pull_s = pulled.wire_s > queue_s ? pulled.wire_s - queue_s : 0;
      }
    }
    double delays_s = compute_s * delayed;
    double crowding = row->is_decode != 0 ? prompt->crowding_decode : prompt->crowding_prefill;
    double crowding_s = compute_s * crowding;
    double prompt_own_s = queue_s + bring_s + pull_s + compute_s + delays_s + crowding_s;

    double answering = row->answering_context + (more[3] < 0 ? more[3] : 0);
    double coming = row->coming_context + (more[3] > 0 ? more[3] : 0);
    double context = (answering > 0 ? answering : 0) + coming;
    double busy_s = streams * row->row_s + context * row->row_context_s;
    double own_s = row->base_s + prompt->prompt_tokens * row->row_context_s;
    double decode_s = prompt->expected_tokens * (own_s + busy_s);
    double slows_s = prompt->expected_tokens * busy_s * prompt->choices;
    double blocks = whole_up(prompt->prompt_tokens + prompt->choices * prompt->expected_tokens, row->block_tokens);
    double lacking = blocks - cached[i] - row->room_blocks;
    if (lacking < 0) lacking = 0;
    double total = row->total_blocks > 1 ? row->total_blocks : 1;
    double room_s = lacking / total * prompt->expected_tokens * step_s;
    double lacks = whole_up(prompt->prompt_tokens, row->block_tokens) - cached[i];
    double lacking_bytes = prompt->moves_kv != 0 && lacks > 0 ? lacks * row->block_bytes : 0;
    double answer_s = room_s + decode_s + slows_s;

    alone_s[i] = prompt_own_s + answer_s;
    prompts[2 * i] = prompt_own_s;
    prompts[2 * i + 1] = compute_s;
    answers[2 * i] = answer_s;
    answers[2 * i + 1] = lacking_bytes;
  }
  std::vector<Best> best(2 * formats);
  for (uint32_t step = 0; step < count; ++step) {
    uint32_t i = first + step < count ? first + step : first + step - count;
    if (static_cast<int32_t>(i) == avoid) continue;
    const BatonRow* row = rows + i;
    Best* halves_of = &best[2 * static_cast<uint32_t>(row->format)];
    double wire_s = answers[2 * i + 1] / row->unmeasured_bytes_per_s * prompt->exposed_share;
    if (row->is_decode == 0)
      halves_of[0].offer(prompts[2 * i], static_cast<int32_t>(i));
    else
      halves_of[1].offer(answers[2 * i] + wire_s, static_cast<int32_t>(i));
  }
  for (uint32_t half = 0; half < 2 * formats; ++half)
    for (int k = 0; k < kPaired; ++k)
      halves[half * kPaired + k] = k < best[half].count ? best[half].worker[k] : -1;
}

// Finds the cheapest `most` placements: (computes, holds, cost). One worker may do both.
// `rates` has the measured bytes/s of the pairs of each format, row by row; 0: not measured.
uint32_t baton_price_cheapest(const BatonRow* rows, uint32_t count, const BatonPrompt* prompt,
                              uint32_t first, uint32_t formats, int32_t alone, int32_t pairs,
                              const double* alone_s, const double* prompts, const double* answers,
                              const int32_t* halves, const double* rates, uint32_t most,
                              int32_t* chosen, double* costs) {
  uint32_t found = 0;
  auto offer = [&](double cost, int32_t computes, int32_t holds) {
    if (found == most && !(cost < costs[found - 1])) return;
    uint32_t at = found < most ? found++ : found - 1;
    for (; at > 0 && costs[at - 1] > cost; --at) {
      costs[at] = costs[at - 1];
      chosen[2 * at] = chosen[2 * at - 2];
      chosen[2 * at + 1] = chosen[2 * at - 1];
    }
    costs[at] = cost;
    chosen[2 * at] = computes;
    chosen[2 * at + 1] = holds;
  };
  for (uint32_t step = 0; alone != 0 && step < count; ++step) {
    int32_t i = static_cast<int32_t>(first + step < count ? first + step : first + step - count);
    if (alone_s[i] < INFINITY) offer(alone_s[i], i, i);
  }
  for (uint32_t format = 0; pairs != 0 && format < formats; ++format)
    for (int p = 0; p < kPaired; ++p)
      for (int d = 0; d < kPaired; ++d) {
        int32_t prefill = halves[(2 * format) * kPaired + p];
        int32_t decode = halves[(2 * format + 1) * kPaired + d];
        if (prefill < 0 || decode < 0) continue;
        double rate = rates[(format * kPaired + p) * kPaired + d];
        if (rate == 0) rate = rows[decode].unmeasured_bytes_per_s;
        double wire_s = answers[2 * decode + 1] / rate;
        double hidden_s = wire_s - prompts[2 * prefill + 1], exposed_s = wire_s * prompt->exposed_share;
        double transfer_s = prompt->edge_overhead_s + (hidden_s > exposed_s ? hidden_s : exposed_s);
        offer(prompts[2 * prefill] + answers[2 * decode] + transfer_s, prefill, decode);
      }
  return found;
}

}  // extern "C"
