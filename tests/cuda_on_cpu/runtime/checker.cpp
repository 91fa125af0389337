#include "checker.h"

#include <algorithm>
#include <memory>
#include <sys/mman.h>

#include "traffic.h"

using check::Access;
using check::Space;

// ---------------------------------------------------------------- state of a byte
static constexpr u16 SEVERAL = 0xffff;  // several threads have read the byte

struct WarpReads {  // lanes of a warp that have read a byte, and the time of the last read
  u32 lanes, time;
};
struct Cell {
  u32 write_block, write_time;  // blocks are numbered from 1 in the order they run; 0: never written
  u32 read_block, read_time;
  u32 readers;  // index of the list of readers, if there are several
  u16 writer, reader;
  bool by_atomic, several_blocks, under_way;  // under_way: no thread has waited yet for a cp.async to the byte
};

struct Range {
  u64 start, end;
  bool writable;
  u8* valid;
  Cell* cells;  // of writable ranges
};

static std::vector<Range> ranges;
static size_t last_range;
static std::vector<Cell> shared_cells;
static std::vector<WarpReads> reader_lists;  // n_warps entries for each byte with several readers
static u32 n_threads, n_warps, block_number, now;
static std::vector<u32> clocks;  // per thread: the time of its accesses
static std::vector<u32> known;   // [thread][other]: accesses of `other` up to this time precede those of `thread`
static bool counting;

static std::vector<MemoryRange>& module_ranges() {
  static std::vector<MemoryRange> of_module;
  return of_module;
}
void check::add_module_range(u64 address, u64 n_bytes, bool writable) { module_ranges().push_back({address, n_bytes, writable, nullptr}); }

// ---------------------------------------------------------------- order
static bool is_before(u32 thread, u32 time) { return (int)thread == current->index || known[(size_t)current->index * n_threads + thread] >= time; }

void check::synchronize(const std::vector<int>& members) {
  static std::vector<u32> joined;
  joined.assign(n_threads, 0);
  for (int member : members) {
    const u32* row = &known[(size_t)member * n_threads];
    for (u32 i = 0; i < n_threads; i++) joined[i] = std::max(joined[i], row[i]);
  }
  for (int member : members) joined[member] = std::max(joined[member], clocks[member]);
  now++;
  for (int member : members) {
    std::copy(joined.begin(), joined.end(), &known[(size_t)member * n_threads]);
    clocks[member] = now;
  }
}

// ---------------------------------------------------------------- races
static void report_race(const char* what, u32 other, bool other_block, const char* where, int site) {
  if (other_block) fail("race", "%s of %s memory by another block, with nothing that orders them, at <site %d>", what, where, site);
  fail("race", "%s of %s memory by thread %u of the block, with no barrier between, at <site %d>", what, where, other, site);
}

static WarpReads* reader_list(const Cell& cell) { return &reader_lists[(size_t)cell.readers * n_warps]; }

// Start a list of readers, because `reader`, the only one before, is joined by others.
static void list_readers(Cell& cell) {
  if (cell.readers == 0) {
    cell.readers = (u32)(reader_lists.size() / n_warps);
    reader_lists.resize(reader_lists.size() + n_warps);
  }
  std::fill_n(reader_list(cell), n_warps, WarpReads{0, 0});
  reader_list(cell)[cell.reader / WARP_SIZE] = {1u << cell.reader % WARP_SIZE, cell.read_time};
  cell.reader = SEVERAL;
}

static bool all_before(int warp, const WarpReads& reads) {
  for (u32 lanes = reads.lanes; lanes; lanes &= lanes - 1)
    if (!is_before((u32)(warp * WARP_SIZE + __builtin_ctz(lanes)), reads.time)) return false;
  return true;
}

static void note_read(Cell& cell) {
  const u32 me = (u32)current->index, time = clocks[me];
  if (cell.read_block != block_number) {
    cell.several_blocks = cell.read_block != 0;
    cell.read_block = block_number, cell.reader = (u16)me, cell.read_time = time;
    return;
  }
  if (cell.reader == me || (cell.reader != SEVERAL && is_before(cell.reader, cell.read_time))) {
    cell.reader = (u16)me, cell.read_time = time;  // the access of this thread covers earlier ones
    return;
  }
  if (cell.reader != SEVERAL) list_readers(cell);
  WarpReads& mine = reader_list(cell)[current->warp];
  if (mine.time != time && all_before(current->warp, mine)) mine.lanes = 0;
  mine.lanes |= 1u << current->lane;
  mine.time = std::max(mine.time, time);
}

static void check_readers(const Cell& cell, const char* where, int site) {
  if (cell.several_blocks || (cell.read_block && cell.read_block != block_number)) report_race("write after a read", 0, true, where, site);
  if (cell.read_block == 0) return;
  if (cell.reader != SEVERAL) {
    if (!is_before(cell.reader, cell.read_time)) report_race("write after a read", cell.reader, false, where, site);
    return;
  }
  for (u32 warp = 0; warp < n_warps; warp++) {
    const WarpReads& reads = reader_list(cell)[warp];
    for (u32 lanes = reads.lanes; lanes; lanes &= lanes - 1) {
      const u32 other = warp * WARP_SIZE + (u32)__builtin_ctz(lanes);
      if (!is_before(other, reads.time)) report_race("write after a read", other, false, where, site);
    }
  }
}

static void check_writer(const Cell& cell, Access access, const char* where, int site) {
  if (cell.write_block == 0) return;
  const bool atomics = cell.by_atomic && (access == Access::atomic || access == Access::atomic_read);
  if (atomics) return;
  const char* what = access == Access::read || access == Access::atomic_read ? "read after a write" : "write after a write";
  if (cell.write_block != block_number) report_race(what, 0, true, where, site);
  if (!is_before(cell.writer, cell.write_time)) report_race(what, cell.writer, false, where, site);
}

static void judge(Cell& cell, Access access, const char* where, int site) {
  if (cell.under_way) fail("async copy", "access to shared memory whose cp.async has not been waited for, at <site %d>", site);
  check_writer(cell, access, where, site);
  if (access == Access::read || access == Access::atomic_read) return note_read(cell);
  check_readers(cell, where, site);
  cell.write_block = block_number, cell.write_time = clocks[current->index], cell.writer = (u16)current->index;
  cell.by_atomic = access == Access::atomic;
  cell.read_block = 0, cell.several_blocks = false;  // the write covers the reads
}

// ---------------------------------------------------------------- spaces
static bool is_read(Access access) { return access == Access::read || access == Access::atomic_read; }

static Cell* shared_cell(u64 address, u32 n_bytes, int site) {
  const u64 offset = address - (u64)shared_memory;
  if (offset >= shared_bytes || offset + n_bytes > shared_bytes)
    fail("out of bounds", "%u bytes at offset %ld of %lu bytes of shared memory, at <site %d>", n_bytes, (long)offset, shared_bytes, site);
  Cell* cells = &shared_cells[offset];
  for (u32 i = 0; i < n_bytes; i++)  // forget accesses of earlier blocks
    if (cells[i].write_block != block_number && cells[i].read_block != block_number) {
      const u32 readers = cells[i].readers;
      cells[i] = Cell{};
      cells[i].readers = readers;
    }
  return cells;
}

static void check_shared(Access access, u64 address, u32 n_bytes, int site) {
  Cell* cells = shared_cell(address, n_bytes, site);
  for (u32 i = 0; i < n_bytes; i++) {
    const bool reads = access != Access::write;
    if (reads && cells[i].write_block == 0) fail("uninitialised", "read of shared memory that the block never wrote, at <site %d>", site);
    judge(cells[i], access, "shared", site);
  }
}

static void report_out_of_bounds(Access access, u64 address, u32 n_bytes, int site) {
  s64 nearest = INT64_MAX;
  size_t which = 0;
  for (size_t i = 0; i < ranges.size(); i++) {
    const s64 distance = address < ranges[i].start ? (s64)(ranges[i].start - address) : (s64)(address + n_bytes - ranges[i].end);
    if (distance < nearest) nearest = distance, which = i;
  }
  if (ranges.empty()) fail("out of bounds", "%u bytes of global memory, and no range was given, at <site %d>", n_bytes, site);
  fail("out of bounds", "%s of %u bytes, %ld bytes %s range %lu of %lu bytes, at <site %d>", is_read(access) ? "read" : "write", n_bytes,
       (long)nearest, address < ranges[which].start ? "before" : "beyond the end of", which, ranges[which].end - ranges[which].start, site);
}

static Range& find_range(Access access, u64 address, u32 n_bytes, int site) {
  const auto holds = [&](const Range& range) { return address >= range.start && address + n_bytes <= range.end; };
  if (last_range < ranges.size() && holds(ranges[last_range])) return ranges[last_range];
  for (size_t i = 0; i < ranges.size(); i++)
    if (holds(ranges[i])) return ranges[last_range = i];
  report_out_of_bounds(access, address, n_bytes, site);
  __builtin_unreachable();
}

static void check_global(Access access, u64 address, u32 n_bytes, int site) {
  Range& range = find_range(access, address, n_bytes, site);
  const u64 offset = address - range.start;
  if (!is_read(access) && !range.writable) fail("out of bounds", "write to memory that the caller said is only read, at <site %d>", site);
  if (range.valid) {
    if (access != Access::write)
      for (u32 i = 0; i < n_bytes; i++)
        if (!range.valid[offset + i]) fail("uninitialised", "read of global memory that nobody wrote, at <site %d>", site);
    if (!is_read(access)) memset(range.valid + offset, 1, n_bytes);
  }
  if (range.writable)
    for (u32 i = 0; i < n_bytes; i++) judge(range.cells[offset + i], access, "global", site);
}

void check::access(Space space, Access access, u64 address, u32 n_bytes, int site) {
  const bool in_shared = space == Space::shared || (space == Space::generic && address - (u64)shared_memory < shared_bytes);
  if (!in_shared && is_local(address, n_bytes)) {
    if (space == Space::generic) return;
    fail("out of bounds", "global access to a thread's local memory, at <site %d>", site);
  }
  if (counting) traffic::record(site, current->index, address, n_bytes, !is_read(access), in_shared);
  in_shared ? check_shared(access, address, n_bytes, site) : check_global(access, address, n_bytes, site);
}

// ---------------------------------------------------------------- cp.async: a write at an unknown time between its issue and the wait
void check::issue_copy(u64 to, u64 from, u32 n_bytes, u32 n_from, int site) {
  if (n_from) check::access(Space::global, Access::read, from, n_from, site);
  if (counting) traffic::record(-1 - site, current->index, to, n_bytes, true, true);
  check_shared(Access::write, to, n_bytes, site);
  for (u32 i = 0; i < n_bytes; i++) shared_cell(to, n_bytes, site)[i].under_way = true;
}

void check::finish_copy(const AsyncCopy& copy) {
  Cell* cells = shared_cell(copy.to, copy.n_bytes, copy.site);
  for (u32 i = 0; i < copy.n_bytes; i++) cells[i].under_way = false;
  check_shared(Access::write, copy.to, copy.n_bytes, copy.site);
}

// ---------------------------------------------------------------- launches and blocks
static Cell* new_cells(u64 n) {  // zeros; the system allocates pages when they are used
  void* memory = mmap(nullptr, n * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("crash", "no memory to check %lu bytes", n);
  return (Cell*)memory;
}

static void add_range(const MemoryRange& range) {
  if (range.n_bytes == 0) return;
  Cell* cells = range.writable ? new_cells(range.n_bytes) : nullptr;
  ranges.push_back({range.address, range.address + range.n_bytes, range.writable != 0, range.valid, cells});
}

void check::begin_launch(const Launch& launch, int threads) {
  n_threads = (u32)threads, n_warps = (n_threads + WARP_SIZE - 1) / WARP_SIZE;
  counting = launch.counting;
  block_number = 0, last_range = 0;
  for (u64 i = 0; i < launch.n_ranges; i++) add_range(launch.ranges[i]);
  for (const MemoryRange& range : module_ranges()) add_range(range);
  shared_cells.assign(shared_bytes, Cell{});
  reader_lists.assign(n_warps, WarpReads{0, 0});  // list 0: no reader
  if (counting) traffic::begin_launch(threads);
}

void check::begin_block() {
  block_number++, now = 1;
  clocks.assign(n_threads, now);
  known.assign((size_t)n_threads * n_threads, 0);
}

void check::end_block() {
  if (counting) traffic::end_block();
}

void check::end_launch() {
  for (Range& range : ranges)
    if (range.cells) munmap(range.cells, (range.end - range.start) * sizeof(Cell));
  ranges.clear();
}
