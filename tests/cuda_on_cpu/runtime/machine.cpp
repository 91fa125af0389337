#include "machine.h"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <string>
#include <vector>
#include <sys/mman.h>

#include "checker.h"
#include "fiber.h"

Thread* current;
u32 mutation;
Dim grid_size, block_size, block_id;
u8* shared_memory;
u64 shared_bytes, static_shared_bytes;

static constexpr u32 SLICE = 4096;  // backward jumps of a thread before other threads run
static constexpr int N_BARRIERS = 16;
static constexpr int N_MEETINGS = 8;

struct Warp {
  u32 live, exited;
  u32 open;  // bit i: meetings[i] is in use
  Meeting meetings[N_MEETINGS];
};
struct Barrier {
  u32 expected, arrived;
  int site;
  bool votes[3];  // of bar.red so far: (unused), all, any
  u32 population;
  std::vector<int> members;
};

struct AsyncCopies {
  std::vector<AsyncCopy> open;                 // since the last commit
  std::vector<std::vector<AsyncCopy>> groups;  // the oldest first
};

static Launch launch;
static std::vector<Thread> threads;
static std::vector<AsyncCopies> copies;  // of each thread
static std::vector<Warp> warps;
static Barrier barriers[N_BARRIERS];
static u32 barrier_results[1024][3];
static int n_threads, n_done;
static Stacks stacks;
static constexpr size_t MOST_STACKS = 64;  // that a module keeps from launch to launch
static void* scheduler_stack;
static bool failed, gave_way;
static char error_text[2048];
static u64 random_state;

u64 random_number() {  // xorshift64
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

// ---------------------------------------------------------------- errors
static void write_error(const char* kind, const char* text) {
  failed = true;
  int n = snprintf(error_text, sizeof error_text, "%s|%s [block (%u, %u, %u)", kind, text, block_id.x, block_id.y, block_id.z);
  if (current && n < (int)sizeof error_text)
    n += snprintf(error_text + n, sizeof error_text - n, ", thread (%u, %u, %u)", current->id.x, current->id.y, current->id.z);
  if (n < (int)sizeof error_text) snprintf(error_text + n, sizeof error_text - n, "]");
}

static void to_scheduler() { switch_stack(&current->stack_pointer, scheduler_stack); }

void fail(const char* kind, const char* format, ...) {
  char text[1500];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  write_error(kind, text);
  to_scheduler();  // never returns
  __builtin_unreachable();
}

void give_way(int site) {
  if (current->slices_left-- == 0) fail("endless loop", "a thread jumped back more than %lu times, last at <site %d>", launch.step_limit, site);
  current->steps_left = launch.schedule == Schedule::random ? 1 + random_number() % 64 : SLICE;
  gave_way = true;  // it may wait for another warp
  to_scheduler();
}

// ---------------------------------------------------------------- meetings of a warp
static u32 lanes_expected(const Warp& warp, u32 mask) { return mask & warp.live & ~warp.exited; }

static void wait_for_meeting(int site) {
  current->state = State::at_warp_meeting;
  current->site = site;
  to_scheduler();
}

Meeting* enter_meeting(u32 mask, int site, const void* input, void* output) {
  Thread& me = *current;
  Warp& warp = warps[me.warp];
  if (!(mask >> me.lane & 1)) fail("collective", "lane %d is not in the mask %08x of <site %d>", me.lane, mask, site);
  Meeting* meeting = nullptr;
  for (u32 open = warp.open; open; open &= open - 1) {
    Meeting& other = warp.meetings[__builtin_ctz(open)];
    if (!(other.mask & mask)) continue;
    if (other.mask != mask || other.site != site)
      fail("collective", "lanes of a warp meet in different instructions or masks: <site %d> with mask %08x and <site %d> with mask %08x",
           site, mask, other.site, other.mask);
    meeting = &other;
  }
  if (!meeting) {
    const int free = __builtin_ctz(~warp.open);
    if (free >= N_MEETINGS) fail("collective", "more than %d divergent collectives at <site %d>", N_MEETINGS, site);
    warp.open |= 1u << free;
    meeting = &warp.meetings[free];
    meeting->mask = mask, meeting->arrived = 0, meeting->site = site;
  }
  meeting->inputs[me.lane] = input;
  meeting->outputs[me.lane] = output;
  meeting->arrived |= 1u << me.lane;
  if (meeting->arrived == lanes_expected(warp, mask)) return meeting;
  me.must_combine = false;
  wait_for_meeting(site);
  return me.must_combine ? meeting : nullptr;
}

void close_meeting(Meeting& meeting) {
  Thread* first = &threads[current->warp * WARP_SIZE];
  for (int lane = 0; lane < WARP_SIZE; lane++)
    if (meeting.arrived >> lane & 1) first[lane].state = State::ready;
  Warp& warp = warps[current->warp];
  warp.open &= ~(1u << (&meeting - warp.meetings));
}

void warp_barrier(u32 mask, int site) {
  meet<char, char>(mask, site, 0, [](const Meeting& meeting) {
    if (!launch.checking) return;
    std::vector<int> members;
    for (int lane = 0; lane < WARP_SIZE; lane++)
      if (meeting.arrived >> lane & 1) members.push_back(current->warp * WARP_SIZE + lane);
    check::synchronize(members);
  });
}

// ---------------------------------------------------------------- barriers of a block
static bool is_whole_block(const Barrier& barrier) { return barrier.expected == 0; }

static void open_barrier(Barrier& barrier) {
  if (launch.checking) check::synchronize(barrier.members);
  for (int member : barrier.members) {
    barrier_results[member][(int)Reduce::population] = barrier.population;
    barrier_results[member][(int)Reduce::all] = barrier.votes[(int)Reduce::all];
    barrier_results[member][(int)Reduce::any] = barrier.votes[(int)Reduce::any];
    Thread& thread = threads[member];
    if (thread.state == State::at_block_barrier) thread.state = State::ready;
  }
  barrier.arrived = 0;
}

static bool is_complete(const Barrier& barrier) {
  return barrier.arrived == (is_whole_block(barrier) ? (u32)(n_threads - n_done) : barrier.expected);
}

// Adds the current thread; opens the barrier and returns true if it was the last.
static bool enter_barrier(u32 id, u32 count, bool vote, int site) {
  if (id >= N_BARRIERS) fail("barrier", "barrier %u does not exist, at <site %d>", id, site);
  if (count % WARP_SIZE || count > (u32)(n_threads + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE)
    fail("barrier", "barrier %u for %u threads of a block of %d, at <site %d>", id, count, n_threads, site);
  Barrier& barrier = barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = count, barrier.site = site, barrier.population = 0;
    barrier.votes[(int)Reduce::all] = true, barrier.votes[(int)Reduce::any] = false;
    barrier.members.clear();
  } else if (barrier.expected != count) {
    fail("barrier", "barrier %u with %u threads at <site %d> but %u at <site %d>", id, count, site, barrier.expected, barrier.site);
  }
  // All threads meet in one instruction; barriers for some of the warps (producers and consumers) only within a warp.
  for (int member : barrier.members)
    if ((is_whole_block(barrier) || threads[member].warp == current->warp) && threads[member].site != site)
      fail("barrier", "divergent barrier: reached at <site %d> while other threads wait at <site %d>", site, threads[member].site);
  barrier.members.push_back(current->index);
  barrier.arrived++;
  barrier.population += vote;
  barrier.votes[(int)Reduce::all] &= vote;
  barrier.votes[(int)Reduce::any] |= vote;
  current->site = site;
  if (!is_complete(barrier)) return false;
  open_barrier(barrier);
  return true;
}

void block_barrier(u32 id, u32 count, int site) {
  if (enter_barrier(id, count, false, site)) return;
  current->state = State::at_block_barrier;
  to_scheduler();
}

void block_arrive(u32 id, u32 count, int site) {
  if (count == 0) fail("barrier", "bar.arrive without a thread count at <site %d>", site);
  enter_barrier(id, count, false, site);
}

u32 block_reduce(Reduce kind, u32 id, u32 count, bool value, int site) {
  if (!enter_barrier(id, count, value, site)) {
    current->state = State::at_block_barrier;
    to_scheduler();
  }
  return barrier_results[current->index][(int)kind];
}

// ---------------------------------------------------------------- asynchronous copies
// The device may carry out a copy at any time between its issue and the wait for it.
static void land(AsyncCopy& copy) {
  if (copy.landed) return;
  memcpy((void*)copy.to, (const void*)copy.from, copy.n_from);
  memset((void*)(copy.to + copy.n_from), 0, copy.n_bytes - copy.n_from);
  copy.landed = true;
}

void async_copy(u64 to, u64 from, u32 n_bytes, u32 n_from, int site) {
  if (to % n_bytes || (n_from && from % n_bytes)) fail("misaligned", "an asynchronous copy of %u bytes at <site %d>", n_bytes, site);
  if (n_from > n_bytes) fail("async copy", "%u bytes of %u wanted at <site %d>", n_from, n_bytes, site);
  if (launch.checking) check::issue_copy(to, from, n_bytes, n_from, site);
  current->copies->open.push_back({to, from, n_bytes, n_from, false, site});
  if (launch.copies == Copies::early || (launch.copies == Copies::random && random_number() & 1)) land(current->copies->open.back());
}

void async_commit() {
  AsyncCopies& copies = *current->copies;
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}

void async_wait(u32 groups_left) {
  auto& groups = current->copies->groups;
  while (groups.size() > groups_left) {
    for (AsyncCopy& copy : groups.front()) {
      land(copy);
      if (launch.checking) check::finish_copy(copy);
    }
    groups.erase(groups.begin());
  }
}

// ---------------------------------------------------------------- the life of a thread
static void leave_copies() {  // copies complete at the end of a block; correct kernels have waited before
  if (current->copies->open.empty() && current->copies->groups.empty()) return;
  async_commit();
  for (auto& group : current->copies->groups)
    if (launch.checking && !group.empty()) fail("async copy", "a thread ends with a copy that it never waited for, issued at <site %d>", group[0].site);
  async_wait(0);
}

static void leave_warp() {  // threads that wait for this lane continue without it
  Warp& warp = warps[current->warp];
  warp.exited |= 1u << current->lane;
  for (u32 open = warp.open; open; open &= open - 1) {
    const Meeting& meeting = warp.meetings[__builtin_ctz(open)];
    if (meeting.arrived != lanes_expected(warp, meeting.mask)) continue;
    Thread& combiner = threads[current->warp * WARP_SIZE + __builtin_ctz(meeting.arrived)];
    combiner.must_combine = true;
    combiner.state = State::ready;
  }
}

static void thread_entry() {
  launch.kernel(launch.parameters);
  leave_copies();
  current->state = State::done;
  n_done++;
  leave_warp();
  for (Barrier& barrier : barriers)
    if (barrier.arrived && is_whole_block(barrier) && is_complete(barrier)) open_barrier(barrier);
  to_scheduler();
  __builtin_unreachable();
}

// ---------------------------------------------------------------- the schedule
static void start_block() {
  n_done = 0;
  for (Barrier& barrier : barriers) barrier.arrived = 0;
  memset(shared_memory, 0xff, shared_bytes);  // NaN and -1, so that uninitialised memory gives wrong results
  for (size_t i = 0; i < warps.size(); i++) {
    const int n_lanes = std::min(WARP_SIZE, n_threads - (int)i * WARP_SIZE);
    warps[i].live = n_lanes == WARP_SIZE ? FULL_MASK : (1u << n_lanes) - 1;
    warps[i].exited = warps[i].open = 0;
  }
  for (int i = 0; i < n_threads; i++) {
    Thread& thread = threads[i];
    const u32 x = block_size.x, y = block_size.y;
    thread.id = {i % x, i / x % y, i / x / y};
    thread.index = i, thread.lane = i % WARP_SIZE, thread.warp = i / WARP_SIZE;
    thread.state = State::ready;
    thread.site = -1;
    thread.steps_left = launch.schedule == Schedule::random ? 1 + random_number() % 64 : SLICE;
    // random slices are short, but count as full slices of 64
    thread.slices_left = launch.step_limit / (launch.schedule == Schedule::random ? 64 : SLICE);
    thread.copies = &copies[i];
    copies[i].open.clear();
    copies[i].groups.clear();
    thread.stack_pointer = stacks.prepare(i, thread_entry);
  }
  if (launch.checking) check::begin_block();
}

static void shuffle(std::vector<int>& order) {
  for (size_t i = order.size() - 1; i > 0; i--) std::swap(order[i], order[random_number() % (i + 1)]);
}

// Run each ready lane of a warp until it must wait.  Returns whether any lane was ready.
static bool run_lanes(int warp, const std::vector<int>& lanes) {
  bool any = false;
  for (int lane : lanes) {
    const int index = warp * WARP_SIZE + lane;
    if (index >= n_threads || threads[index].state != State::ready) continue;
    any = true;
    current = &threads[index];
    switch_stack(&scheduler_stack, current->stack_pointer);
    if (failed) return true;
  }
  return any;
}

static void report_deadlock() {
  std::map<std::pair<bool, int>, int> waiting;
  for (const Thread& thread : threads)
    if (thread.state != State::done) waiting[{thread.state == State::at_block_barrier, thread.site}]++;
  std::string text = std::to_string(n_done) + " threads have ended";
  for (const auto& [where, count] : waiting)
    text += ", " + std::to_string(count) + (where.first ? " wait at the barrier <site " : " wait for lanes of their warp at <site ") +
            std::to_string(where.second) + ">";
  current = nullptr;
  write_error("deadlock", text.c_str());
}

// Forward: warps and lanes in order, each warp until it waits.  Reverse: the opposite.  Random: short runs of shuffled lanes.
static void run_block() {
  static std::vector<int> warp_order, lane_order;
  start_block();
  const bool reverse = launch.schedule == Schedule::reverse, random = launch.schedule == Schedule::random;
  const auto fill = [&](std::vector<int>& order, int count) {
    order.resize(count);
    for (int i = 0; i < count; i++) order[i] = reverse ? count - 1 - i : i;
  };
  fill(warp_order, (int)warps.size());
  fill(lane_order, WARP_SIZE);
  while (n_done < n_threads) {
    bool progress = false;
    if (random) shuffle(warp_order);
    for (int warp : warp_order) {
      u64 burst = random ? 1 + random_number() % 64 : ~(u64)0;
      gave_way = false;
      while (burst-- && !gave_way) {
        if (random) shuffle(lane_order);
        if (!run_lanes(warp, lane_order)) break;
        progress = true;
        if (failed) return;
      }
    }
    if (!progress) return report_deadlock();
  }
  if (launch.checking) check::end_block();
}

// ---------------------------------------------------------------- shared memory
// Between two regions that trap, with its end as close to the second as the alignment permits.
static u8* place_shared_memory(u64 n_bytes) {
  static constexpr u64 CAPACITY = 256 << 10, GUARD = 1 << 20, ALIGN = 1024;
  static u8* pages;
  if (!pages) {
    pages = (u8*)mmap(nullptr, CAPACITY + 2 * GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(pages, GUARD, PROT_NONE);
    mprotect(pages + GUARD + CAPACITY, GUARD, PROT_NONE);
  }
  return pages + GUARD + CAPACITY - (n_bytes + ALIGN - 1) / ALIGN * ALIGN;
}

// ---------------------------------------------------------------- crashes
// An invalid pointer or a stack overflow ends the launch, not the process.
static sigjmp_buf crash_return;
static void on_crash(int signal, siginfo_t*, void*) { siglongjmp(crash_return, signal); }

class CrashGuard {
 public:
  CrashGuard() {
    static char stack[64 << 10];
    stack_t alternative{};
    alternative.ss_sp = stack, alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &old_[i]);
  }
  ~CrashGuard() {
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int SIGNALS[4] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  struct sigaction old_[4];
  stack_t old_stack_{};
};
constexpr int CrashGuard::SIGNALS[4];

// ---------------------------------------------------------------- a launch
static void order_blocks(std::vector<u64>& order) {
  for (u64 i = 0; i < order.size(); i++) order[i] = launch.schedule == Schedule::reverse ? order.size() - 1 - i : i;
  if (launch.schedule == Schedule::random)
    for (size_t i = order.size() - 1; i > 0; i--) std::swap(order[i], order[random_number() % (i + 1)]);
}

static void run_grid() {
  std::vector<u64> order((u64)grid_size.x * grid_size.y * grid_size.z);
  order_blocks(order);
  for (u64 block : order) {
    block_id = {(u32)(block % grid_size.x), (u32)(block / grid_size.x % grid_size.y), (u32)(block / grid_size.x / grid_size.y)};
    run_block();
    current = nullptr;
    if (failed) return;
  }
}

bool check::is_local(u64 address, u64 n_bytes) { return stacks.contains(current->index, (const void*)address, n_bytes); }

#define EXPORT extern "C" __attribute__((visibility("default")))

// Run a launch to its end.  Returns 0, or 1 with an error that launch_error() returns.
EXPORT int run_launch(const Launch* wanted) {
  launch = *wanted;
  mutation = launch.mutation;
  grid_size = {launch.grid[0], launch.grid[1], launch.grid[2]};
  block_size = {launch.block[0], launch.block[1], launch.block[2]};
  block_id = {0, 0, 0};
  n_threads = (int)(block_size.x * block_size.y * block_size.z);
  threads.resize(n_threads);
  copies.resize(n_threads);
  warps.resize((n_threads + WARP_SIZE - 1) / WARP_SIZE);
  stacks.reserve(n_threads);
  static_shared_bytes = launch.static_shared_bytes;
  shared_bytes = static_shared_bytes + launch.dynamic_shared_bytes;
  shared_memory = place_shared_memory(shared_bytes);
  random_state = 0x9e3779b97f4a7c15ull * (launch.seed + 1);
  failed = false;
  current = nullptr;
  CrashGuard guard;
  if (const int signal = sigsetjmp(crash_return, 1)) {
    write_error("crash", signal == SIGFPE ? "arithmetic trap" : "access to memory that is not there (check mode tells where)");
  } else {
    if (launch.checking) check::begin_launch(launch, n_threads);
    run_grid();
  }
  if (launch.checking) check::end_launch();
  current = nullptr;
  stacks.release_beyond(MOST_STACKS);
  return failed;
}

EXPORT const char* launch_error() { return error_text; }
