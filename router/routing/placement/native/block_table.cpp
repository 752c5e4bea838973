// Table of the workers that have each block; block_table.py beside this folder is the specification.
//
// 2048 parts, each an open-addressed table with linear probing, so that growing moves a 2048th of
// everything at a time. A block is one entry of 32 bytes: its whole hash, and up to seven workers.
// A block that more workers have gets a bit set of workers outside the table.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

constexpr int kParts = 2048;
constexpr int kPartsOfASweep = kParts / 256;  // see PARTS of block_table.py
constexpr int kInline = 7;
constexpr uint16_t kInSet = 0xFFFF;
constexpr uint64_t kFirstSlots = 8;
constexpr int kAhead = 8;  // blocks of a batch whose entries are prefetched
constexpr uint64_t kFirstLook = 4, kLongestLook = 32;  // blocks of a prompt per lookup
constexpr uint32_t kSetsOfAChunk = 256;

struct Entry {
  uint64_t low, high;
  uint16_t workers[kInline];  // with kInSet: the first two hold the number of a set
  uint16_t count;             // 0: an empty slot
};
static_assert(sizeof(Entry) == 32, "two in a cache line");

struct Part {
  Entry* slots = nullptr;
  uint64_t mask = 0, used = 0;
  uint64_t share = 128;  // used slots of 256 above which it grows
};

struct Table {
  Part parts[kParts];
  std::vector<std::unique_ptr<uint64_t[]>> chunks;  // of sets, `words` each; sets never move
  uint32_t sets = 0;
  std::vector<uint32_t> free_sets;
  uint32_t words;
  uint64_t blocks = 0;

  // The parts fill evenly. Different shares prevent that all of them grow at one time.
  explicit Table(uint32_t workers) : words((workers + 63) / 64) {
    for (int i = 0; i < kParts; ++i) parts[i].share = 128 + i * 80 / kParts;
  }
  ~Table() {
    for (Part& part : parts) std::free(part.slots);
  }

  uint64_t* set_of(const Entry& entry) {
    uint32_t number;
    std::memcpy(&number, entry.workers, sizeof number);
    return set_at(number);
  }

  uint64_t* set_at(uint32_t number) {
    return chunks[number / kSetsOfAChunk].get() + number % kSetsOfAChunk * uint64_t{words};
  }

  uint32_t new_set() {
    if (!free_sets.empty()) {
      uint32_t number = free_sets.back();
      free_sets.pop_back();
      std::memset(set_at(number), 0, words * 8);
      return number;
    }
    if (sets % kSetsOfAChunk == 0)
      chunks.emplace_back(new uint64_t[kSetsOfAChunk * uint64_t{words}]());
    return sets++;
  }
};

struct Hash {
  uint64_t low, high;
};

Hash hash_at(const uint8_t* hashes, uint64_t index) {
  Hash hash;
  std::memcpy(&hash, hashes + index * 16, 16);
  return hash;
}

// Workers may send hashes that are not uniform, so all bits choose the slot.
uint64_t mixed(Hash hash) {
  return (hash.low ^ hash.high * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
}

Part& part_of(Table* table, Hash hash) { return table->parts[mixed(hash) / (~0ull / kParts + 1)]; }

uint64_t home_of(const Part& part, Hash hash) { return mixed(hash) >> 20 & part.mask; }

Entry* find(Part& part, Hash hash) {
  if (part.slots == nullptr) return nullptr;
  for (uint64_t at = home_of(part, hash);; at = (at + 1) & part.mask) {
    Entry& entry = part.slots[at];
    if (entry.count == 0) return nullptr;
    if (entry.low == hash.low && entry.high == hash.high) return &entry;
  }
}

Entry* empty_slot(Part& part, Hash hash) {
  uint64_t at = home_of(part, hash);
  while (part.slots[at].count != 0) at = (at + 1) & part.mask;
  return &part.slots[at];
}

bool grow(Part& part) {
  uint64_t slots = part.slots == nullptr ? kFirstSlots : (part.mask + 1) * 2;
  auto* fresh = static_cast<Entry*>(std::calloc(slots, sizeof(Entry)));
  if (fresh == nullptr) return false;
  Part larger;
  larger.slots = fresh;
  larger.mask = slots - 1;
  larger.used = part.used;
  larger.share = part.share;
  if (part.slots != nullptr)
    for (uint64_t at = 0; at <= part.mask; ++at)
      if (part.slots[at].count != 0) {
        const Entry& entry = part.slots[at];
        *empty_slot(larger, {entry.low, entry.high}) = entry;
      }
  std::free(part.slots);
  part = larger;
  return true;
}

// Close the gap of a removed entry, so that no probe ends too early.
void erase(Part& part, Entry* gone) {
  uint64_t hole = static_cast<uint64_t>(gone - part.slots);
  for (uint64_t at = (hole + 1) & part.mask; part.slots[at].count != 0; at = (at + 1) & part.mask) {
    uint64_t home = home_of(part, {part.slots[at].low, part.slots[at].high});
    if (((at - home) & part.mask) >= ((at - hole) & part.mask)) {
      part.slots[hole] = part.slots[at];
      hole = at;
    }
  }
  part.slots[hole].count = 0;
  --part.used;
}

bool holds(Table* table, Entry* entry, uint32_t worker) {
  if (entry->count == kInSet) return table->set_of(*entry)[worker / 64] >> (worker % 64) & 1;
  for (int i = 0; i < entry->count; ++i)
    if (entry->workers[i] == worker) return true;
  return false;
}

// Return 1 if added, 0 if present, -1 without memory.
int add(Table* table, Hash hash, uint32_t worker) {
  Part& part = part_of(table, hash);
  Entry* entry = find(part, hash);
  if (entry == nullptr) {
    if (part.slots == nullptr || (part.used + 1) * 256 > (part.mask + 1) * part.share)
      if (!grow(part)) return -1;
    entry = empty_slot(part, hash);
    entry->low = hash.low;
    entry->high = hash.high;
    entry->workers[0] = static_cast<uint16_t>(worker);
    entry->count = 1;
    ++part.used;
    ++table->blocks;
    return 1;
  }
  if (holds(table, entry, worker)) return 0;
  if (entry->count == kInSet) {
    table->set_of(*entry)[worker / 64] |= 1ull << (worker % 64);
  } else if (entry->count < kInline) {
    entry->workers[entry->count++] = static_cast<uint16_t>(worker);
  } else {
    uint32_t number = table->new_set();
    uint64_t* set = table->set_at(number);
    for (int i = 0; i < kInline; ++i) set[entry->workers[i] / 64] |= 1ull << (entry->workers[i] % 64);
    set[worker / 64] |= 1ull << (worker % 64);
    std::memcpy(entry->workers, &number, sizeof number);
    entry->count = kInSet;
  }
  return 1;
}

void drop_entry(Table* table, Part& part, Entry* entry) {
  if (entry->count == kInSet) {
    uint32_t number;
    std::memcpy(&number, entry->workers, sizeof number);
    table->free_sets.push_back(number);
  }
  erase(part, entry);
  --table->blocks;
}

bool is_empty(const uint64_t* set, uint32_t words) {
  uint64_t any = 0;
  for (uint32_t i = 0; i < words; ++i) any |= set[i];
  return any == 0;
}

bool remove(Table* table, Hash hash, uint32_t worker) {
  Part& part = part_of(table, hash);
  Entry* entry = find(part, hash);
  if (entry == nullptr || !holds(table, entry, worker)) return false;
  if (entry->count == kInSet) {
    uint64_t* set = table->set_of(*entry);
    set[worker / 64] &= ~(1ull << (worker % 64));
    if (is_empty(set, table->words)) drop_entry(table, part, entry);
    return true;
  }
  for (int i = 0; i < entry->count; ++i)
    if (entry->workers[i] == worker) entry->workers[i] = entry->workers[entry->count - 1];
  if (entry->count == 1)
    drop_entry(table, part, entry);
  else
    --entry->count;
  return true;
}

// Remove the workers in `gone` from an entry; return whether none is left.
bool without(Table* table, Entry* entry, const uint64_t* gone) {
  if (entry->count == kInSet) {
    uint64_t* set = table->set_of(*entry);
    for (uint32_t i = 0; i < table->words; ++i) set[i] &= ~gone[i];
    return is_empty(set, table->words);
  }
  uint16_t kept = 0;
  for (int i = 0; i < entry->count; ++i) {
    uint16_t worker = entry->workers[i];
    if (!(gone[worker / 64] >> (worker % 64) & 1)) entry->workers[kept++] = worker;
  }
  if (kept == 0) return true;
  entry->count = kept;
  return false;
}

void prefetch(Table* table, Hash hash) {
  Part& part = part_of(table, hash);
  if (part.slots != nullptr) __builtin_prefetch(&part.slots[home_of(part, hash)]);
}

void fetch_set(Table* table, const Entry& entry) {
  const uint64_t* set = table->set_of(entry);
  for (uint32_t word = 0; word < table->words; word += 8) __builtin_prefetch(set + word);
}

// Return the workers of a block's entries (at most one per table) as a set: usually a table's own
// set without a copy, otherwise `gathered`.
const uint64_t* holders(Table** tables, uint32_t tables_count, const Entry* const* entries,
                        std::vector<uint64_t>& gathered) {
  size_t words = gathered.size();
  const uint64_t* having = nullptr;
  for (uint32_t t = 0; t < tables_count; ++t) {
    const Entry* entry = entries[t];
    if (entry == nullptr) continue;
    if (entry->count == kInSet && having == nullptr) {
      having = tables[t]->set_of(*entry);
      continue;
    }
    if (having == nullptr)
      std::fill(gathered.begin(), gathered.end(), 0);
    else if (having != gathered.data())
      std::copy(having, having + words, gathered.begin());
    having = gathered.data();
    if (entry->count == kInSet) {
      const uint64_t* set = tables[t]->set_of(*entry);
      for (size_t w = 0; w < words; ++w) gathered[w] |= set[w];
    } else {
      for (int k = 0; k < entry->count; ++k)
        gathered[entry->workers[k] / 64] |= 1ull << (entry->workers[k] % 64);
    }
  }
  if (having == nullptr) std::fill(gathered.begin(), gathered.end(), 0);
  return having == nullptr ? gathered.data() : having;
}

}  // namespace

extern "C" {

Table* baton_blocks_new(uint32_t workers) { return new (std::nothrow) Table(workers); }

void baton_blocks_delete(Table* table) { delete table; }

// Make room for more workers: every set becomes longer.
void baton_blocks_widen(Table* table, uint32_t workers) {
  uint32_t words = (workers + 63) / 64;
  if (words <= table->words) return;
  for (auto& chunk : table->chunks) {
    std::unique_ptr<uint64_t[]> wider(new uint64_t[kSetsOfAChunk * uint64_t{words}]());
    for (uint32_t set = 0; set < kSetsOfAChunk; ++set)
      std::memcpy(&wider[set * uint64_t{words}], &chunk[set * uint64_t{table->words}], table->words * 8);
    chunk = std::move(wider);
  }
  table->words = words;
}

uint64_t baton_blocks_count(Table* table) { return table->blocks; }

uint64_t baton_blocks_bytes(Table* table) {
  uint64_t bytes = sizeof(Table) + table->chunks.size() * kSetsOfAChunk * table->words * 8;
  for (const Part& part : table->parts)
    if (part.slots != nullptr) bytes += (part.mask + 1) * sizeof(Entry);
  return bytes;
}

// Both return the number of changed blocks, and fold them into `checksum`.
uint64_t baton_blocks_add(Table* table, const uint8_t* hashes, uint64_t count, uint32_t worker,
                          uint64_t most, uint64_t* checksum) {
  uint64_t added = 0;
  for (uint64_t i = 0; i < count && added < most; ++i) {
    if (i + kAhead < count) prefetch(table, hash_at(hashes, i + kAhead));
    Hash hash = hash_at(hashes, i);
    if (add(table, hash, worker) == 1) {
      ++added;
      *checksum ^= hash.low;
    }
  }
  return added;
}

uint64_t baton_blocks_remove(Table* table, const uint8_t* hashes, uint64_t count, uint32_t worker,
                             uint64_t* checksum) {
  uint64_t removed = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(table, hash_at(hashes, i + kAhead));
    Hash hash = hash_at(hashes, i);
    if (remove(table, hash, worker)) {
      ++removed;
      *checksum ^= hash.low;
    }
  }
  return removed;
}

// Find for each worker of `live` that has the first block how many leading blocks it has, in any of
// the tables. Return the number of those workers.
//
// A lookup waits for memory, so several blocks are looked up at once: while the entries of some are
// read, those of the next, and their sets, are being fetched.
uint32_t baton_blocks_match(Table** tables, uint32_t tables_count, const uint8_t* hashes,
                            uint64_t count, const uint64_t* live, uint32_t words,
                            uint16_t* workers, uint32_t* lengths) {
  uint32_t found = 0;  // all tables, and `live`, have room for words * 64 workers
  std::vector<uint64_t> alive(live, live + words), gathered(words);
  std::vector<const Entry*> entries(kLongestLook * tables_count);
  auto fetch = [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end && i < count; ++i)
      for (uint32_t t = 0; t < tables_count; ++t) prefetch(tables[t], hash_at(hashes, i));
  };
  uint64_t look = kFirstLook;
  fetch(0, look);
  for (uint64_t begin = 0; begin < count; begin += look, look = std::min(2 * look, kLongestLook)) {
    uint64_t end = std::min(begin + look, count);
    fetch(begin + look, begin + look + std::min(2 * look, kLongestLook));
    for (uint64_t i = begin; i < end; ++i)
      for (uint32_t t = 0; t < tables_count; ++t) {
        Hash hash = hash_at(hashes, i);
        const Entry* entry = find(part_of(tables[t], hash), hash);
        entries[(i - begin) * tables_count + t] = entry;
        if (entry != nullptr && entry->count == kInSet) fetch_set(tables[t], *entry);
      }
    for (uint64_t i = begin; i < end; ++i) {
      const uint64_t* having =
          holders(tables, tables_count, &entries[(i - begin) * tables_count], gathered);
      uint64_t changed = 0, any = 0;
      for (uint32_t w = 0; w < words; ++w) {
        changed |= alive[w] & ~having[w];
        any |= alive[w] & having[w];
      }
      for (uint32_t w = 0; changed != 0 && w < words; ++w) {
        uint64_t dropped = alive[w] & ~having[w];
        alive[w] &= having[w];
        for (; i > 0 && dropped != 0; dropped &= dropped - 1) {
          workers[found] = static_cast<uint16_t>(w * 64 + __builtin_ctzll(dropped));
          lengths[found++] = static_cast<uint32_t>(i);
        }
      }
      if (any == 0) return found;
    }
  }
  for (uint32_t w = 0; count != 0 && w < words; ++w)
    for (uint64_t left = alive[w]; left != 0; left &= left - 1) {
      workers[found] = static_cast<uint16_t>(w * 64 + __builtin_ctzll(left));
      lengths[found++] = static_cast<uint32_t>(count);
    }
  return found;
}

// Remove the workers in `gone` from some of 256 parts, each of which is several of ours.
void baton_blocks_sweep(Table* table, const uint64_t* gone, uint32_t first, uint32_t count) {
  uint32_t end = (first + count) * kPartsOfASweep;
  for (uint32_t number = first * kPartsOfASweep; number < end && number < kParts; ++number) {
    Part& part = table->parts[number];
    for (uint64_t at = 0; part.slots != nullptr && at <= part.mask;) {
      Entry* entry = &part.slots[at];
      if (entry->count != 0 && without(table, entry, gone))
        drop_entry(table, part, entry);  // another one may be in this slot now
      else
        ++at;
    }
  }
}

// List the hashes of a worker, at most `room`; return their number.
uint64_t baton_blocks_list(Table* table, uint32_t worker, uint8_t* hashes, uint64_t room) {
  uint64_t found = 0;
  for (Part& part : table->parts)
    for (uint64_t at = 0; part.slots != nullptr && at <= part.mask; ++at) {
      Entry* entry = &part.slots[at];
      if (entry->count == 0 || !holds(table, entry, worker)) continue;
      if (found < room) std::memcpy(hashes + found * 16, entry, 16);
      ++found;
    }
  return found;
}

void baton_blocks_clear(Table* table) {
  for (Part& part : table->parts) {
    std::free(part.slots);
    part.slots = nullptr;
    part.mask = part.used = 0;
  }
  table->chunks.clear();
  table->sets = 0;
  table->free_sets.clear();
  table->blocks = 0;
}

}  // extern "C"
