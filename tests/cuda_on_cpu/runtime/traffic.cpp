#include "traffic.h"

#include <algorithm>
#include <map>
#include <vector>

static constexpr int WARP = 32;
static constexpr u64 SECTOR = 32, BANKS = 32, WORD = 4, PASS_BYTES = BANKS * WORD;

struct Request {  // one execution of an instruction by a warp
  int n_lanes = 0;
  u64 addresses[WARP];
  u8 lanes[WARP];
};
struct Counts {
  u32 n_bytes;
  bool is_write, is_shared;
  std::vector<u32> executions;                 // of each thread in this block
  std::vector<std::vector<Request>> requests;  // of each warp in this block
  u64 n_requests = 0, used = 0, ideal = 0;     // sectors of global memory, passes of shared
};
static std::map<int, Counts> all_counts;
static int n_threads;

void traffic::begin_launch(int threads) {
  all_counts.clear();
  n_threads = threads;
}

void traffic::record(int site, int thread, u64 address, u32 n_bytes, bool is_write, bool is_shared) {
  Counts& counts = all_counts[site];
  counts.n_bytes = n_bytes, counts.is_write = is_write, counts.is_shared = is_shared;
  if (counts.executions.empty()) {
    counts.executions.assign(n_threads, 0);
    counts.requests.assign((n_threads + WARP - 1) / WARP, {});
  }
  const u32 execution = counts.executions[thread]++;  // lanes do an instruction for the nth time together
  auto& requests = counts.requests[thread / WARP];
  if (requests.size() <= execution) requests.resize(execution + 1);
  Request& request = requests[execution];
  request.lanes[request.n_lanes] = (u8)(thread % WARP);
  request.addresses[request.n_lanes++] = address;
}

static u64 count_distinct(std::vector<u64>& numbers) {
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers.size();
}

static std::vector<u64> places(const Request& request, u32 n_bytes, u64 grain, int first_lane, int last_lane) {
  std::vector<u64> found;
  for (int i = 0; i < request.n_lanes; i++)
    if (request.lanes[i] >= first_lane && request.lanes[i] < last_lane)
      for (u64 place = request.addresses[i] / grain; place <= (request.addresses[i] + n_bytes - 1) / grain; place++) found.push_back(place);
  return found;
}

static void add_global(Counts& counts, const Request& request) {
  std::vector<u64> sectors = places(request, counts.n_bytes, SECTOR, 0, WARP);
  std::vector<u64> bytes = places(request, counts.n_bytes, 1, 0, WARP);
  counts.used += count_distinct(sectors);
  counts.ideal += (count_distinct(bytes) + SECTOR - 1) / SECTOR;
}

static void add_shared(Counts& counts, const Request& request) {
  // Wide accesses go in groups of lanes that together make 128 bytes.
  const int group = (int)std::min<u64>(WARP, PASS_BYTES / counts.n_bytes);
  for (int first = 0; first < WARP; first += group) {
    std::vector<u64> words = places(request, counts.n_bytes, WORD, first, first + group);
    const u64 n_words = count_distinct(words);
    u64 of_bank[BANKS] = {};
    for (u64 word : words) of_bank[word % BANKS]++;
    counts.used += *std::max_element(of_bank, of_bank + BANKS);
    counts.ideal += (n_words + BANKS - 1) / BANKS;
  }
}

void traffic::end_block() {
  for (auto& [site, counts] : all_counts) {
    for (auto& requests : counts.requests)
      for (const Request& request : requests) {
        counts.n_requests++;
        counts.is_shared ? add_shared(counts, request) : add_global(counts, request);
      }
    counts.executions.clear();
    counts.requests.clear();
  }
}

// Rows of 7 numbers: site, bytes a lane, is write, is shared, requests, used, ideal.  Returns how many there are.
extern "C" __attribute__((visibility("default"))) int read_traffic(u64* rows, int capacity) {
  int n = 0;
  for (const auto& [site, counts] : all_counts) {
    if (n < capacity) {
      const u64 row[7] = {(u64)site, counts.n_bytes, counts.is_write, counts.is_shared, counts.n_requests, counts.used, counts.ideal};
      std::copy(row, row + 7, rows + 7 * n);
    }
    n++;
  }
  return n;
}
