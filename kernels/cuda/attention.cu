// Flash attention over the paged cache (Dao et al., arXiv:2205.14135), for prefill and decode.
//
// A row is a token and one of the `group_size` query heads that share a key head; row number t * group_size + h of a
// sequence is its token t and head h.  Rows are computed 16 at once, the size of matrix instructions.
//
// The cache is divided into splits: of one page each for the first FINE_PAGES pages, so that many blocks share a short
// cache, and of SPLIT_PAGES pages after them.  A row's sums over a split start with a fresh state (largest score, total
// of the weights, weighted sum of values), and pages are added in order; the states of the splits are then merged in
// order.  `attention_prefill` does all of this for many rows.  For few rows, `attention_split` assigns splits to
// different blocks, and `attention_merge` merges them.  Each element of a product is summed in the same order in both,
// and a position that a row does not see adds exactly zero: so a row has the same bits for any other rows in its tile
// and its batch.
//
// Queries are rounded to float16 after multiplication by a power of two that brings a row's largest value near 2^14;
// scores are float32, in units of log 2.  Weights are rounded to halves, also for their total, and added in float32.
//
// Compiled for: KEY_DIM and VALUE_DIM; KEY_BITS and VALUE_BITS, 16 for halves; VALUES_IN_KEYS, whether values are the
// first VALUE_DIM values of the keys (MLA), so that each page is read once for both; CHUNKED, CAUSAL, HAS_SPANS and
// PART, the visibility of positions; SOFT_CAP, SINKS, HAS_SLOPES (each 0 or 1); BIAS_WIDTH, the number of distances with a bias per head;
// and for the launch geometry that attention.py chooses: WARPS of `attention_prefill`, and PREFILL_AHEAD and
// SPLIT_AHEAD, the pages that are copied to shared memory while another page is used.
//
// A warp reads 32 KiB of shared memory per 16 rows and page of heads of 128 values: 256 clocks of a multiprocessor's
// port, for products that take 216 clocks on an H200.  This limits prefill to 470 of 580 TFLOP/s.
#include "attention.cuh"

#define KEY_HEAD ((KEY_DIM + 15) / 16 * 16)
#define VALUE_HEAD ((VALUE_DIM + 15) / 16 * 16)
#define KEY_STEPS (KEY_HEAD / 16)
#define VALUE_STEPS (VALUE_HEAD / 16)
#define VALUE_ROW (VALUES_IN_KEYS ? KEY_HEAD : VALUE_HEAD)  // stored values of a token
#define LARGER_ROW (KEY_HEAD > VALUE_HEAD ? KEY_HEAD : VALUE_HEAD)
#define HAS_CODES (KEY_BITS < 16 || VALUE_BITS < 16)  // pages are then converted, also pages of halves
#define GROUPS_OF(head) (((head) + PER_SCALE - 1) / PER_SCALE)
#define STRIDE_OF(head) ((head) + 8)  // halves per row in shared memory: eight rows map to different banks
#define KEY_STRIDE STRIDE_OF(KEY_HEAD)
#define VALUE_STRIDE STRIDE_OF(VALUE_ROW)
#define KEY_TILES (PAGE / 8)
#define PAIRS_PER_SCALE (PER_SCALE / 16)  // pairs of tiles of values
#define ROWS 16
#define PROMPT 1  // values of PART
#define REPLY 2

#define LOG2_E 1.4426950408889634f
// A masked score, and the initial largest score: greater than a masked score, so that 2^(masked - largest) is 0, but
// less than any other score.
#define MASKED -3e38f
#define LOWEST -2e38f

// -- Rows and tiles ---------------------------------------------------------------------------------------------------

// The new tokens of a batch's sequences.
struct Batch {
  const int *header, *starts, *kv_lengths, *ends, *block_tables;
  int block_stride;  // entries of a block table
};

struct Tile {
  int sequence, kv_length, first_token, first_position, first_row, n_rows;  // n_rows is 0 if there is no such tile
  int partial_row;  // among the rows of the sequences with tiles
};

// Tile `number`, of `rows` rows, of the sequences with least ... most tokens.  A sequence's last tiles, which see the
// most positions, come first.
DEVICE Tile find_tile(const Batch& batch, int number, int rows, int group_size, int least, int most) {
  int partial_row = 0;
  for (int s = 0; s < batch.header[N_SEQUENCES]; s++) {
    const int start = batch.starts[s], n_tokens = batch.starts[s + 1] - start;
    if (n_tokens < least || n_tokens > most) continue;
    const int n_rows = n_tokens * group_size, n_tiles = (n_rows + rows - 1) / rows;
    if (number < n_tiles) {
      const int first_row = (n_tiles - 1 - number) * rows;
      const int kv_length = batch.kv_lengths[s];
      const int n = min(rows, n_rows - first_row);
      return {s, kv_length, start, kv_length - n_tokens, first_row, n, partial_row + first_row};
    }
    number -= n_tiles, partial_row += n_rows;
  }
  return {};
}

// The split of a page, and the first page of a split.
DEVICE int split_of(int page) { return page < FINE_PAGES ? page : FINE_PAGES + (page - FINE_PAGES) / SPLIT_PAGES; }
DEVICE int first_page_of(int split) {
  return split < FINE_PAGES ? split : FINE_PAGES + (split - FINE_PAGES) * SPLIT_PAGES;
}

// The positions that a row or a tile sees.
struct Sight {
  int first, last;
  __device__ __forceinline__ bool has(int position) const { return first <= position && position <= last; }
};

// The positions that a row sees: up to its token's position, and with HAS_SPANS up to the end given by the batch.  With
// PART, `ends` contains the position that divides the sequence, and a row sees only the part before or after it.  Rows
// after the tile's end count as its last row.  `window`: the window, or the size of a chunk.
DEVICE Sight row_sight(const Batch& batch, const Tile& tile, int row, int group_size, int window) {
  const int token = (tile.first_row + min(row, tile.n_rows - 1)) / group_size, own = tile.first_position + token;
  const int first = CHUNKED ? own - own % window : max(0, own - window + 1);
  if (PART == PROMPT) return {0, max(1, batch.ends[tile.first_token + token]) - 1};
  if (PART == REPLY) return {batch.ends[tile.first_token + token], own};
  if (HAS_SPANS) return {first, batch.ends[tile.first_token + token] - 1};
  return {first, CAUSAL ? own : min(tile.kv_length, own + window) - 1};
}

DEVICE Sight sight_of(const Batch& batch, const Tile& tile, int rows, int group_size, int window) {
  return {row_sight(batch, tile, 0, group_size, window).first, row_sight(batch, tile, rows, group_size, window).last};
}

// The positions that a row sees, and the factor of products with its query.
struct Row {
  Sight sight;
  float factor;
#if HAS_SLOPES
  float slope;  // decrease of scores per position of distance
  int own;
#elif BIAS_WIDTH
  const float* bias;  // for distance 0; biases of later positions follow
  int own;
#endif
};

DEVICE Row make_row(const Batch& batch, const Tile& tile, int row, int kv_head, int group_size, int window, float factor,
                    const float* by_distance) {
  Row made = {row_sight(batch, tile, row, group_size, window), factor};
#if HAS_SLOPES
  const int number = tile.first_row + min(row, tile.n_rows - 1);
  made.slope = LOG2_E * by_distance[kv_head * group_size + number % group_size];
  made.own = tile.first_position + number / group_size;
#elif BIAS_WIDTH
  const int number = tile.first_row + min(row, tile.n_rows - 1);
  made.bias = by_distance + (kv_head * group_size + number % group_size) * BIAS_WIDTH + BIAS_WIDTH / 2;
  made.own = tile.first_position + number / group_size;
#endif
  return made;
}

// A row's score of a position, reduced by the distance, or with the distance's bias.
DEVICE float lowered(float score, const Row& row, int position) {
#if HAS_SLOPES
  return fmaf(-row.slope, fabsf((float)(row.own - position)), score);
#elif BIAS_WIDTH
  return fmaf(LOG2_E, row.bias[max(-(BIAS_WIDTH / 2), min(BIAS_WIDTH / 2, position - row.own))], score);
#else
  return score;
#endif
}

// Offset of a row's head of `dim` values.
DEVICE size_t place_of(const Tile& tile, int row, int kv_head, int group_size, int stride, int dim) {
  const int number = tile.first_row + row;
  const int head = kv_head * group_size + number % group_size;
  return (size_t)(tile.first_token + number / group_size) * stride + head * dim;
}

// Loads row `row` of a tile as halves, padded with zeros, with all lanes of a warp.  Returns the factor of its scores.
// 16 rows of halves cost one read of 4 * KEY_DIM bytes per row.
DEVICE float load_query(const float* q, int n, uint16_t* to) {
  const int lane = threadIdx.x % 32;
  float largest = 0.0f;
  for (int i = lane; i < n; i += 32) largest = fmaxf(largest, fabsf(q[i]));
  const int exponent = __float_as_int(warp_max(largest)) >> 23;
  const int power = min(14 + 254 - exponent, 253);
  const float factor = __int_as_float(power << 23);
  for (int i = lane; i < KEY_HEAD; i += 32) to[i] = i < n ? float_to_half(q[i] * factor) : 0;
  return __int_as_float((254 - power) << 23);
}

// Bytes of a page's halves or codes, and of its scales.
#define ENTRY_BYTES(head, bits) (PAGE * (head) * (bits) / 8)
#define SCALE_BYTES(head, bits) ((bits) < 16 ? 2 * PAGE * GROUPS_OF(head) : 0)
#define PAGE_BYTES(head, bits) (ENTRY_BYTES(head, bits) + SCALE_BYTES(head, bits))

// -- Pages ------------------------------------------------------------------------------------------------------------

// Keys or values of a layer, heads of HEAD values: halves [pages, key heads, PAGE, HEAD]; or codes of that shape, and
// scales, halves [pages, key heads, GROUPS_OF(HEAD), PAGE].
struct Pages {
  const uint8_t* entries;
  const uint16_t* scales;
  template <int HEAD, int BITS>
  __device__ __forceinline__ Pages at(size_t block) const {
    return {entries + block * ENTRY_BYTES(HEAD, BITS), scales + block * (PAGE * GROUPS_OF(HEAD))};
  }
};

// Sizes of a page as loaded, of the converted page, and of its factors.
#if HAS_CODES
#define KEY_BYTES PAGE_BYTES(KEY_HEAD, KEY_BITS)
#define VALUE_BYTES PAGE_BYTES(VALUE_ROW, VALUE_BITS)
#define LOAD_BYTES (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES)
#define FACTOR_BYTES (4 * PAGE * GROUPS_OF(LARGER_ROW))
#define WIDE_BYTES (2 * PAGE * STRIDE_OF(LARGER_ROW))
#else
#define LOAD_BYTES (2 * PAGE * STRIDE_OF(LARGER_ROW))
#define FACTOR_BYTES 0
#define WIDE_BYTES 0
#endif

// Starts to copy a page to `buffer`.  Halves outside the tile's sight become zeros, because undefined memory may
// contain NaN, and 0 * NaN is NaN.
template <int THREADS, int HEAD, int BITS>
DEVICE void load_page(uint8_t* buffer, const Pages& pages, size_t block, int position,
                                          const Sight& sight) {
  const uint8_t* entries = pages.at<HEAD, BITS>(block).entries;
#if HAS_CODES
#pragma unroll 4
  for (int i = threadIdx.x; i < ENTRY_BYTES(HEAD, BITS) / 16; i += THREADS)
    copy16_or_zeros(buffer + 16 * i, entries + 16 * i, true);
  const uint8_t* scales = (const uint8_t*)pages.at<HEAD, BITS>(block).scales;
  for (int i = threadIdx.x; i < SCALE_BYTES(HEAD, BITS) / 16; i += THREADS)
    copy16_or_zeros(buffer + ENTRY_BYTES(HEAD, BITS) + 16 * i, scales + 16 * i, true);
#else
#pragma unroll 4
  for (int i = threadIdx.x; i < PAGE * HEAD / 8; i += THREADS) {
    const int row = i / (HEAD / 8), column = i % (HEAD / 8);
    copy16_or_zeros(buffer + 2 * STRIDE_OF(HEAD) * row + 16 * column, entries + 16 * i, sight.has(position + row));
  }
#endif
}

#if HAS_CODES
// A page in shared memory, as loaded by `load_page`.
template <int HEAD, int BITS>
DEVICE Pages loaded(const uint8_t* buffer) { return {buffer, (const uint16_t*)(buffer + ENTRY_BYTES(HEAD, BITS))}; }

// Converts four bits to the fifth bits of bytes.
DEVICE uint32_t fifth_bits(uint32_t bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }

// Sixteen codes, number `i` of a page's groups of codes, plus 128.
template <int HEAD, int BITS>
DEVICE uint4 codes_of(const uint8_t* entries, int i) {
  if constexpr (BITS == 8) {
    const uint4 x = ((const uint4*)entries)[i];
    return make_uint4(x.x ^ 0x80808080u, x.y ^ 0x80808080u, x.z ^ 0x80808080u, x.w ^ 0x80808080u);
  } else {
    const uint2 x = ((const uint2*)entries)[i];
    uint32_t codes[4] = {x.x & 0x0F0F0F0Fu, x.y & 0x0F0F0F0Fu, x.x >> 4 & 0x0F0F0F0Fu, x.y >> 4 & 0x0F0F0F0Fu};
    const uint32_t fifths = BITS == 5 ? ((const uint16_t*)(entries + PAGE * HEAD / 2))[i] : 0;
#pragma unroll
    for (int j = 0; j < 4; j++) codes[j] = (codes[j] | fifth_bits(fifths >> 4 * j)) + (BITS == 5 ? 0x70707070u : 0x78787878u);
    return make_uint4(codes[0], codes[1], codes[2], codes[3]);
  }
}

// Converts two codes to halves, exactly: 0x6400 + b is 1024 + b.
DEVICE uint32_t codes_to_halves(uint32_t word, uint32_t selector, uint32_t power) {
  const uint32_t biased = __byte_perm(word, 0x64646464u, selector);
  return multiply_halves(subtract_halves(biased, 0x64806480u), power);
}

// Converts a page's codes to halves [PAGE, STRIDE_OF(HEAD)], times a power of two near the scale, exactly, and writes
// the remaining factor of the scale to `factors` [GROUPS_OF(HEAD), PAGE]: from 1 to 2, except for the largest scales
// and zero.  Weights times factors can therefore be rounded to halves for any scales.  For pages of halves, only
// positions that the tile does not see become zeros, as in `load_page`, and factors are 1.
template <int THREADS, int HEAD, int BITS>
DEVICE void widen_page(const Pages& from, uint16_t* page, float* factors, int position,
                                           const Sight& sight) {
#pragma unroll 2
  for (int i = threadIdx.x; i < PAGE * HEAD / 16; i += THREADS) {
    const int row = i / (HEAD / 16), column = i % (HEAD / 16), group = column / (PER_SCALE / 16);
    const bool is_seen = sight.has(position + row);
    uint4* to = (uint4*)(page + STRIDE_OF(HEAD) * row + 16 * column);
    if constexpr (BITS == 16) {
      const uint4 zeros = make_uint4(0, 0, 0, 0), *const halves = (const uint4*)from.entries + 2 * i;
      to[0] = is_seen ? halves[0] : zeros, to[1] = is_seen ? halves[1] : zeros;
      if (column % (PER_SCALE / 16) == 0) factors[group * PAGE + row] = 1.0f;
      continue;
    }
    const float scale = half_to_float(from.scales[group * PAGE + row]);
    // A code of undefined memory is at least -128, and finite times 2^8.
    const int exponent = min(max((__float_as_int(fabsf(scale)) >> 23) - 127, -24), 8);
    const uint32_t half_power = exponent < -14 ? 1u << (exponent + 24) : (uint32_t)(exponent + 15) << 10;
    const uint32_t power = half_power | half_power << 16;
    const uint4 codes = codes_of<HEAD, BITS>(from.entries, i);
    to[0] = make_uint4(codes_to_halves(codes.x, 0x4140, power), codes_to_halves(codes.x, 0x4342, power),
                           codes_to_halves(codes.y, 0x4140, power), codes_to_halves(codes.y, 0x4342, power));
    to[1] = make_uint4(codes_to_halves(codes.z, 0x4140, power), codes_to_halves(codes.z, 0x4342, power),
                           codes_to_halves(codes.w, 0x4140, power), codes_to_halves(codes.w, 0x4342, power));
    if (column % (PER_SCALE / 16) == 0)
      factors[group * PAGE + row] = is_seen ? scale * __int_as_float((127 - exponent) << 23) : 0.0f;
  }
}
#endif

// The pages that a block reads: keys and values of every `step`-th split; only keys if they contain the values.
struct Walk {
  int page, low, high, stop, step;  // of the split: pages low ... high; in total: pages before `stop`
  bool is_value;
  __device__ __forceinline__ Walk(int first, int stop, int split, int step) : stop(stop), step(step), is_value(false) {
    enter(split, first);
  }
  __device__ __forceinline__ void enter(int split, int first) {
    low = page = max(first, first_page_of(split)), high = min(stop, first_page_of(split + 1));
  }
  __device__ __forceinline__ bool is_over() const { return page >= stop; }
  __device__ __forceinline__ bool begins_split() const { return page == low && !is_value; }
  __device__ __forceinline__ void advance() {
    page += VALUES_IN_KEYS || is_value;
    is_value = !VALUES_IN_KEYS && !is_value;
    if (page == high) enter(split_of(low) + step, 0);
  }
};

// Loads these pages to shared memory, AHEAD pages while another page is used.  They use PLACES buffers in turn,
// followed by the factors and the buffer for converted pages; without AHEAD, pages are converted directly from global
// memory.
template <int THREADS, int AHEAD>
struct Stream {
  static constexpr int PLACES = AHEAD + !HAS_CODES, BYTES = PLACES * LOAD_BYTES + FACTOR_BYTES + WIDE_BYTES;
  const Pages keys, values;
  const int* table;
  const int kv_head, n_kv_heads;
  const Sight sight;
  uint8_t* const shared;
  Walk ahead;
  int load_place, place;
  __device__ __forceinline__ Pages pages() const {
    return {ahead.is_value ? values.entries : keys.entries, ahead.is_value ? values.scales : keys.scales};
  }
  __device__ __forceinline__ size_t block() const { return (size_t)table[ahead.page] * n_kv_heads + kv_head; }
  __device__ __forceinline__ float* factors() const { return (float*)(shared + PLACES * LOAD_BYTES); }
  __device__ __forceinline__ void load_next() {
    if (!ahead.is_over()) {
      uint8_t* const buffer = shared + load_place * LOAD_BYTES;
      if ((KEY_HEAD != VALUE_ROW || KEY_BITS != VALUE_BITS) && ahead.is_value)
        load_page<THREADS, VALUE_HEAD, VALUE_BITS>(buffer, values, block(), PAGE * ahead.page, sight);
      else
        load_page<THREADS, KEY_HEAD, KEY_BITS>(buffer, pages(), block(), PAGE * ahead.page, sight);
      load_place = load_place + 1 == PLACES ? 0 : load_place + 1;
      ahead.advance();
    }
    commit_copies();  // also if empty, so that groups can be counted
  }
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load_next();
  }
  // Returns the next page, number `number`, once it has arrived and, with IN_USE, all threads have read the previous
  // page.
  template <int HEAD, int BITS, bool IN_USE = true>
  __device__ __forceinline__ uint16_t* next(int number) {
    if constexpr (AHEAD > 0) wait_for_copies<AHEAD - 1>();
    if (AHEAD > 0 || IN_USE) __syncthreads();
    uint8_t* const buffer = shared + place * LOAD_BYTES;
    place = place + 1 == PLACES ? 0 : place + 1;
#if HAS_CODES
    uint16_t* const page = (uint16_t*)(shared + PLACES * LOAD_BYTES + FACTOR_BYTES);
    widen_page<THREADS, HEAD, BITS>(AHEAD ? loaded<HEAD, BITS>(buffer) : pages().template at<HEAD, BITS>(block()), page,
                                    factors(), PAGE * number, sight);
    __syncthreads();
    if constexpr (AHEAD > 0)
      load_next();
    else
      ahead.advance();
    return page;
#else
    load_next();
    if constexpr (AHEAD == 0) {
      wait_for_copies<0>();
      __syncthreads();
    }
    return (uint16_t*)buffer;
#endif
  }
};

// -- Products ---------------------------------------------------------------------------------------------------------

// Large heads: two or four warps of `attention_prefill` share 16 rows, and each computes a part of the head's values,
// because the sums of all values would not fit its registers.
#define HEAD_PARTS (VALUE_HEAD > 256 ? 4 : VALUE_HEAD > 128 ? 2 : 1)

// 16 rows of queries, in registers if they fit.
#define QUERY_REGISTERS (KEY_HEAD <= (HAS_CODES ? 64 : 128) && HEAD_PARTS == 1)
struct Queries {
  const uint16_t* row;  // address of this lane for ldmatrix
#if QUERY_REGISTERS
  uint32_t a[KEY_STEPS][4];
#endif
  __device__ __forceinline__ explicit Queries(const uint16_t* rows) {
    const int lane = threadIdx.x % 32;
    row = rows + KEY_STRIDE * (lane % 16) + lane / 16 * 8;
#if QUERY_REGISTERS
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) load_matrices(a[step], row + 16 * step);
#endif
  }
};

// sums += queries @ keys.T over 16 values of the head; `row` is this lane's address in the first two tiles of keys.
template <int TILES>
DEVICE void add_scores(float (&sums)[TILES][4], const Queries& q, int step, const uint16_t* row) {
#if QUERY_REGISTERS
  const uint32_t(&words)[4] = q.a[step];
#else
  uint32_t words[4];
  load_matrices(words, q.row + 16 * step);
#endif
  const uint4 a = make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
  for (int tile = 0; tile < TILES; tile += 2) {
    uint32_t keys[4];
    load_matrices(keys, row + 8 * tile * KEY_STRIDE + 16 * step);
    mma_f16(sums[tile], a, keys[0], keys[1]);
    mma_f16(sums[tile + 1], a, keys[2], keys[3]);
  }
}

// Products of the queries with TILES tiles of eight keys, starting at `first_tile`.
template <int TILES>
DEVICE void score_page(float (&scores)[TILES][4], const Queries& q, const uint16_t* page,
                                           const float* factors, int first_tile) {
  const int lane = threadIdx.x % 32;
  const uint16_t* row = page + (8 * first_tile + lane % 8 + lane / 16 * 8) * KEY_STRIDE + lane / 8 % 2 * 8;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[tile][i] = 0.0f;
#if HAS_CODES
  // A few tiles at once, because sums of a group of values are kept in registers in addition to the scores.
  constexpr int SOME = TILES < 4 ? TILES : 4;
#pragma unroll
  for (int first = 0; first < TILES; first += SOME) {
#pragma unroll QUERY_REGISTERS ? 8 : 1
    for (int group = 0; group < GROUPS_OF(KEY_HEAD); group++) {
      float part[SOME][4] = {};
#pragma unroll
      for (int step = 2 * group; step < 2 * group + 2; step++)
        if (step < KEY_STEPS) add_scores(part, q, step, row + 8 * first * KEY_STRIDE);
#pragma unroll
      for (int tile = 0; tile < SOME; tile++) {
        const int key = 8 * (first_tile + first + tile) + lane % 4 * 2;
        const float2 factor = *(const float2*)(factors + group * PAGE + key);
        float(&score)[4] = scores[first + tile];
#pragma unroll
        for (int i = 0; i < 4; i++) score[i] = fmaf(part[tile][i], i % 2 ? factor.y : factor.x, score[i]);
      }
    }
  }
#else
#pragma unroll QUERY_REGISTERS ? 8 : 2
  for (int step = 0; step < KEY_STEPS; step++) add_scores(scores, q, step, row);
#endif
}

// Weights of 16 keys as halves.
DEVICE uint4 weights_of(const float (&near)[4], const float (&far)[4], float2 near_factor, float2 far_factor) {
  return make_uint4(to_halves(near[0] * near_factor.x, near[1] * near_factor.y),
                    to_halves(near[2] * near_factor.x, near[3] * near_factor.y),
                    to_halves(far[0] * far_factor.x, far[1] * far_factor.y),
                    to_halves(far[2] * far_factor.x, far[3] * far_factor.y));
}

// sums += weights @ values for PAIRS times 16 values of the head, starting at pair `first_pair`; total += the sum of
// the weights, in columns that are all equal.
template <int PAIRS>
DEVICE void add_values(float (&sums)[2 * PAIRS][4], float (&total)[4],
                                           const float (&weights)[KEY_TILES][4], const uint16_t* page,
                                           const float* factors, int first_pair) {
  const int lane = threadIdx.x % 32;
  const uint16_t* row = page + lane % 16 * VALUE_STRIDE + lane / 16 * 8 + 16 * first_pair;
  const float2 one = {1.0f, 1.0f};
  const uint32_t ones = 0x3C003C00;
#pragma unroll
  for (int step = 0; step < PAGE / 16; step++) {
    const float(&near)[4] = weights[2 * step], (&far)[4] = weights[2 * step + 1];
    const uint4 plain = weights_of(near, far, one, one);
    mma_f16(total, plain, ones, ones);
#pragma unroll
    for (int group = 0; group < PAIRS; group += PAIRS_PER_SCALE) {
      if (first_pair + group >= VALUE_STEPS) continue;
#if HAS_CODES
      const float* of = factors + (first_pair + group) / PAIRS_PER_SCALE * PAGE + 16 * step + lane % 4 * 2;
      const uint4 halves = weights_of(near, far, *(const float2*)of, *(const float2*)(of + 8));
#else
      const uint4 halves = plain;
#endif
#pragma unroll
      for (int pair = group; pair < group + PAIRS_PER_SCALE && pair < PAIRS; pair++) {
        if (first_pair + pair >= VALUE_STEPS) continue;
        uint32_t values[4];
        load_transposed(values, row + 16 * step * VALUE_STRIDE + 16 * pair);
        mma_f16(sums[2 * pair], halves, values[0], values[1]);
        mma_f16(sums[2 * pair + 1], halves, values[2], values[3]);
      }
    }
  }
}

// -- Softmax ----------------------------------------------------------------------------------------------------------

// Conversion of products to scores: with soft-cap, cap * tanh(score / cap).
struct Scoring {
  float factor, cap;
  __device__ __forceinline__ Scoring(float scale, float soft_cap)
    : factor(SOFT_CAP ? scale / soft_cap : LOG2_E * scale), cap(LOG2_E * soft_cap) {}
  __device__ __forceinline__ float score(float product, float row_factor) const {
    const float x = product * row_factor;
    return SOFT_CAP ? cap * tanh_of(x) : x;
  }
};

// A row's largest score and the total of its weights.
struct State {
  float top, total;
};

// Factors of sums and totals when two states are merged.
struct Merge {
  float keep, add;
  __device__ __forceinline__ Merge(State& ours, const State& theirs) {
    const float top = fmaxf(ours.top, theirs.top);
    keep = exp2_of(ours.top - top), add = exp2_of(theirs.top - top);
    ours = {top, sum(ours.total, theirs.total)};
  }
  __device__ __forceinline__ float sum(float ours, float theirs) const {
    return fmaf(theirs, add, __fmul_rn(ours, keep));
  }
};

// The final factor of a row's sums; a sink is an additional score without a value.
DEVICE float share_of(State state, const float* sinks, int head) {
#if SINKS
  const Merge merge(state, {LOG2_E * sinks[head], 1.0f});
  return merge.keep / state.total;
#else
  return 1.0f / state.total;
#endif
}

// Scales a lane's values of its first or second row.
template <int PAIRS>
DEVICE void scale_sums(float (&sums)[2 * PAIRS][4], float (&weight_sums)[4], int half, float keep) {
  weight_sums[2 * half] *= keep, weight_sums[2 * half + 1] *= keep;
#pragma unroll
  for (int tile = 0; tile < 2 * PAIRS; tile++) sums[tile][2 * half] *= keep, sums[tile][2 * half + 1] *= keep;
}

#define PARAMETERS                                                                                                     \
  const int *__restrict__ header, const int *__restrict__ starts, const int *__restrict__ kv_lengths,          \
    const int *__restrict__ ends, const int *__restrict__ block_tables, int block_stride, int n_kv_heads,          \
    int group_size, int least, int most, int window
#define CACHE_PARAMETERS                                                                                               \
  const uint8_t *__restrict__ keys, const uint16_t *__restrict__ key_scales, const uint8_t *__restrict__ values,     \
    const uint16_t *__restrict__ value_scales

// -- Prefill ----------------------------------------------------------------------------------------------------------

#define PREFILL_THREADS (32 * WARPS)
#define PREFILL_ROWS (ROWS * WARPS / HEAD_PARTS)
#define PREFILL_PAIRS (HEAD_PARTS == 1 ? VALUE_STEPS : (VALUE_STEPS + 2 * HEAD_PARTS - 1) / (2 * HEAD_PARTS) * 2)
#define PREFILL_SUMS (8 * PREFILL_PAIRS)  // per thread
// For the largest heads, the sums of previous splits do not fit shared memory: they are kept in registers.
#define SUMS_IN_REGISTERS (HEAD_PARTS == 4)
#define SUM_STEP (SUMS_IN_REGISTERS ? 1 : PREFILL_THREADS)

// Masks the scores of a page that a row does not see; `position` is the first position of this lane.
DEVICE void mask_scores(float (&scores)[KEY_TILES][4], int half, const Sight& sight, int position) {
#pragma unroll
  for (int i = 0; i < 2 * KEY_TILES; i++)
    if (!sight.has(position + i / 2 * 8 + i % 2)) scores[i / 2][2 * half + i % 2] = MASKED;
}

// Converts this lane's scores of one of its rows to weights, and returns the factor of the previous sums.
DEVICE float weigh(float (&scores)[KEY_TILES][4], int half, float& top) {
  float largest = LOWEST;
#pragma unroll
  for (int i = 0; i < 2 * KEY_TILES; i++) largest = fmaxf(largest, scores[i / 2][2 * half + i % 2]);
  largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
  const float new_top = fmaxf(top, largest), keep = exp2_of(top - new_top);
  top = new_top;
#pragma unroll
  for (int i = 0; i < 2 * KEY_TILES; i++) {
    float& score = scores[i / 2][2 * half + i % 2];
    score = exp2_of(score - new_top);
  }
  return keep;
}

// Merges the sums of a split with the sums of the previous splits, and clears them.
DEVICE void merge_split(float* split_sums, const Merge (&merges)[2], float (&sums)[2 * PREFILL_PAIRS][4],
                        bool is_first) {
#pragma unroll
  for (int i = 0; i < PREFILL_SUMS; i++) {
    float& sum = split_sums[i * SUM_STEP];
    sum = merges[i / 2 % 2].sum(is_first ? 0.0f : sum, sums[i / 4][i % 4]);
    sums[i / 4][i % 4] = 0.0f;
  }
}

// Writes this lane's part of its rows.
DEVICE void write_rows(float* out, int out_stride, const float* split_sums, const State (&total)[2], const float* sinks,
                       const Tile& tile, int warp_row, int first_pair, int kv_head, int group_size) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = warp_row + lane / 4 + 8 * half;
    if (row >= tile.n_rows) continue;
    const float share = share_of(total[half], sinks, kv_head * group_size + (tile.first_row + row) % group_size);
    float* to = out + place_of(tile, row, kv_head, group_size, out_stride, VALUE_DIM);
#pragma unroll
    for (int i = 0; i < PREFILL_SUMS / 2; i++) {
      const int column = 16 * first_pair + i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (column < VALUE_DIM) to[column] = split_sums[(i / 2 * 4 + 2 * half + i % 2) * SUM_STEP] * share;
    }
  }
}

// out = softmax(scale * q @ keys.T, over visible positions) @ values, for the sequences of least ... most tokens.
// Grid: (at least the number of tiles of PREFILL_ROWS rows, key heads).  q, out: float32, with strides in values per
// token.  Each warp has 16 rows, with all their scores, and all or a part of their sums.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS, 1)
  attention_prefill(PARAMETERS, CACHE_PARAMETERS, const float* __restrict__ q, int q_stride, float* __restrict__ out,
                      int out_stride, const float* __restrict__ sinks, float scale, float soft_cap,
                      const float* __restrict__ by_distance) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ Row rows[PREFILL_ROWS];
  const Batch batch = {header, starts, kv_lengths, ends, block_tables, block_stride};
  const Tile tile = find_tile(batch, blockIdx.x, PREFILL_ROWS, group_size, least, most);
  if (tile.n_rows == 0) return;
  const int kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // Shared memory: pages; sums of the previous splits, float32 [PREFILL_SUMS, threads]; rows of queries, which use the
  // memory of the sums if they are moved to registers at once.
  using PrefillStream = Stream<PREFILL_THREADS, PREFILL_AHEAD>;
#if SUMS_IN_REGISTERS
  float split_sums[PREFILL_SUMS];
  uint16_t* const query_rows = (uint16_t*)(shared + PrefillStream::BYTES);
#else
  float* const split_sums = (float*)(shared + PrefillStream::BYTES) + threadIdx.x;
  uint16_t* const query_rows =
    (uint16_t*)(shared + PrefillStream::BYTES + (QUERY_REGISTERS ? 0 : 4 * PREFILL_SUMS * PREFILL_THREADS));
#endif

  const int warp_row = ROWS * (warp / HEAD_PARTS), first_pair = warp % HEAD_PARTS * PREFILL_PAIRS;
  const bool has_rows = warp_row < tile.n_rows;
  const Sight tile_sight = sight_of(batch, tile, PREFILL_ROWS, group_size, window);
  const int* table = block_tables + (size_t)tile.sequence * block_stride;
  const int first_page = tile_sight.first / PAGE;
  Walk walk(first_page, tile_sight.last / PAGE + 1, split_of(first_page), 1);
  PrefillStream stream = {{keys, key_scales}, {values, value_scales}, table, kv_head, n_kv_heads, tile_sight, shared,
                          walk, 0, 0};
  stream.begin();

  const Scoring scoring(scale, soft_cap);
  for (int row = ROWS / HEAD_PARTS * warp; row < ROWS / HEAD_PARTS * (warp + 1); row++) {
    const float* query = q + place_of(tile, min(row, tile.n_rows - 1), kv_head, group_size, q_stride, KEY_DIM);
    const float factor = load_query(query, KEY_DIM, query_rows + KEY_STRIDE * row) * scoring.factor;
    if (lane == 0) rows[row] = make_row(batch, tile, row, kv_head, group_size, window, factor, by_distance);
  }
  __syncwarp();
  const Queries queries(query_rows + KEY_STRIDE * warp_row);

  State total[2] = {{LOWEST, 0.0f}, {LOWEST, 0.0f}};
  float top[2] = {LOWEST, LOWEST}, weight_sums[4] = {}, sums[2 * PREFILL_PAIRS][4] = {};
  bool is_first_split = true;
  while (!walk.is_over()) {
    const int number = walk.page, position = PAGE * number;
    const uint16_t* const page_keys = stream.next<KEY_HEAD, KEY_BITS>(number);
    const Sight low = rows[warp_row].sight, high = rows[warp_row + ROWS - 1].sight;
    const bool is_seen = has_rows && low.first < position + PAGE && position <= high.last;
    const bool is_masked = position < high.first || low.last < position + PAGE - 1;
    float scores[KEY_TILES][4];
    if (is_seen) {
      score_page(scores, queries, page_keys, stream.factors(), 0);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const Row row = rows[warp_row + 8 * half + lane / 4];
#pragma unroll
        for (int i = 0; i < 2 * KEY_TILES; i++) {
          float& score = scores[i / 2][2 * half + i % 2];
          score = lowered(scoring.score(score, row.factor), row, position + lane % 4 * 2 + i / 2 * 8 + i % 2);
        }
        if (is_masked) mask_scores(scores, half, row.sight, position + lane % 4 * 2);
        scale_sums<PREFILL_PAIRS>(sums, weight_sums, half, weigh(scores, half, top[half]));
      }
    }
#if VALUES_IN_KEYS
    const uint16_t* const page_values = page_keys;
#else
    walk.advance();
    const uint16_t* const page_values = stream.next<VALUE_HEAD, VALUE_BITS>(number);
#endif
    if (is_seen)
      add_values<PREFILL_PAIRS>(sums, weight_sums, scores, page_values, stream.factors(), first_pair);
    walk.advance();
    if (walk.begins_split()) {
      const Merge merges[2] = {{total[0], {top[0], weight_sums[0]}}, {total[1], {top[1], weight_sums[2]}}};
      merge_split(split_sums, merges, sums, is_first_split);
#pragma unroll
      for (int i = 0; i < 4; i++) weight_sums[i] = 0.0f;
      top[0] = top[1] = LOWEST;
      is_first_split = false;
    }
  }

  write_rows(out, out_stride, split_sums, total, sinks, tile, warp_row, first_pair, kv_head, group_size);
}

// -- Decode -----------------------------------------------------------------------------------------------------------

#define SPLIT_WARPS 4
#define SPLIT_THREADS (32 * SPLIT_WARPS)
#define SCORE_STRIDE (PAGE + 4)
// Pairs of tiles of values per warp: one, or all pairs that share scales.
#define SPLIT_PAIRS (VALUE_STEPS <= SPLIT_WARPS ? 1 : (VALUE_STEPS + 2 * SPLIT_WARPS - 1) / (2 * SPLIT_WARPS) * 2)

// Computes the state of each row after each split: partial_sums float32 [key heads, max_splits, partial_rows,
// VALUE_HEAD] and partial_states [key heads, max_splits, partial_rows] of (largest score, total).  The sequences have
// at most partial_rows rows, and a tile sees at most max_splits splits.  Grid: (blocks that share the splits of a tile,
// key heads, at least the number of tiles).  For a tile of 16 rows, four warps share the keys of a page to score them,
// and the head's values to add them, so that each sum has the same order as in `attention_prefill`.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS, 3)
  attention_split(PARAMETERS, CACHE_PARAMETERS, const float* __restrict__ q, int q_stride,
          float* __restrict__ partial_sums, float2* __restrict__ partial_states, int max_splits, int partial_rows,
          float scale, float soft_cap, const float* __restrict__ by_distance) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ Row rows[ROWS];
  __shared__ float tops[ROWS], keeps[ROWS];
  __shared__ __align__(16) float scores[ROWS * SCORE_STRIDE];  // of a page; then its weights
  const Batch batch = {header, starts, kv_lengths, ends, block_tables, block_stride};
  const Tile tile = find_tile(batch, blockIdx.z, ROWS, group_size, least, most);
  if (tile.n_rows == 0) return;
  const Sight tile_sight = sight_of(batch, tile, ROWS, group_size, window);
  const int first_page = tile_sight.first / PAGE, first_split = split_of(first_page);
  Walk walk(first_page, tile_sight.last / PAGE + 1, first_split + blockIdx.x, gridDim.x);
  if (walk.is_over()) return;

  const int kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int* table = block_tables + (size_t)tile.sequence * block_stride;
  using SplitStream = Stream<SPLIT_THREADS, SPLIT_AHEAD>;
  SplitStream stream = {{keys, key_scales}, {values, value_scales}, table, kv_head, n_kv_heads, tile_sight, shared,
                        walk, 0, 0};
  uint16_t* const query_rows = (uint16_t*)(shared + SplitStream::BYTES);
  stream.begin();

  const Scoring scoring(scale, soft_cap);
  for (int row = warp; row < ROWS; row += SPLIT_WARPS) {
    const float* query = q + place_of(tile, min(row, tile.n_rows - 1), kv_head, group_size, q_stride, KEY_DIM);
    const float factor = load_query(query, KEY_DIM, query_rows + KEY_STRIDE * row) * scoring.factor;
    if (lane == 0) rows[row] = make_row(batch, tile, row, kv_head, group_size, window, factor, by_distance);
  }
  __syncthreads();
  const Queries queries(query_rows);

  // In the softmax, eight threads share a row: thread c has keys 4 c ... 4 c + 3 and 32 + 4 c ... 32 + 4 c + 3.
  const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
  float* const row_scores = scores + row * SCORE_STRIDE + column;
  float top = LOWEST, weight_sums[4] = {}, sums[2 * SPLIT_PAIRS][4] = {};
  while (!walk.is_over()) {
    uint16_t* const page_keys = stream.next<KEY_HEAD, KEY_BITS>(walk.page);
    float products[2][4];
    score_page(products, queries, page_keys, stream.factors(), 2 * warp);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float* to = scores + (lane / 4 + i / 2 * 8) * SCORE_STRIDE + 16 * warp + i % 2 * 8 + lane % 4 * 2;
      *(float2*)to = make_float2(products[i % 2][i / 2 * 2], products[i % 2][i / 2 * 2 + 1]);
    }
    __syncthreads();

    float largest = LOWEST;
    float mine[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int position = PAGE * walk.page + i / 4 * 32 + column + i % 4;
      mine[i] = lowered(scoring.score(row_scores[i / 4 * 32 + i % 4], rows[row].factor), rows[row], position);
      if (!rows[row].sight.has(position)) mine[i] = MASKED;
      largest = fmaxf(largest, mine[i]);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, step));
    const float new_top = fmaxf(top, largest);
#pragma unroll
    for (int i = 0; i < 8; i++) row_scores[i / 4 * 32 + i % 4] = exp2_of(mine[i] - new_top);
    if (column == 0) keeps[row] = exp2_of(top - new_top), tops[row] = new_top;
    top = new_top;

#if VALUES_IN_KEYS
    uint16_t* const page_values = page_keys;
    __syncthreads();  // all weights are written
#else
    walk.advance();
    uint16_t* const page_values = stream.next<VALUE_HEAD, VALUE_BITS, false>(walk.page);  // keys were read before softmax
#endif
    float weights[KEY_TILES][4];
#pragma unroll
    for (int i = 0; i < 2 * KEY_TILES; i++) {
      const float2 two = *(const float2*)(scores + (lane / 4 + i % 2 * 8) * SCORE_STRIDE + i / 2 * 8 + lane % 4 * 2);
      weights[i / 2][i % 2 * 2] = two.x, weights[i / 2][i % 2 * 2 + 1] = two.y;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      scale_sums<SPLIT_PAIRS>(sums, weight_sums, half, keeps[lane / 4 + 8 * half]);
    }
    add_values<SPLIT_PAIRS>(sums, weight_sums, weights, page_values, stream.factors(), SPLIT_PAIRS * warp);

    const int split = split_of(walk.low) - first_split;
    walk.advance();
    if (!walk.begins_split()) continue;
    const size_t partial_row = ((size_t)kv_head * max_splits + split) * partial_rows + tile.partial_row;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = lane / 4 + 8 * half;
      if (warp == 0 && lane % 4 == 0 && r < tile.n_rows)
        partial_states[partial_row + r] = make_float2(tops[r], weight_sums[2 * half]);
      weight_sums[2 * half] = weight_sums[2 * half + 1] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * SPLIT_PAIRS; i++) {
        const int at = 2 * SPLIT_PAIRS * warp + i;
        if (at < 2 * VALUE_STEPS && r < tile.n_rows)
          *(float2*)(partial_sums + (partial_row + r) * VALUE_HEAD + 8 * at + lane % 4 * 2) =
            make_float2(sums[i][2 * half], sums[i][2 * half + 1]);
        sums[i][2 * half] = sums[i][2 * half + 1] = 0.0f;
      }
    }
    top = LOWEST;
  }
}

// Merges the splits' states of each row in order, and writes the row: to `out`, or if units are given, as codes and
// scales laid out for n_rows tokens (heads of a multiple of 32).  Grid: (16 rows each, key heads, tiles).  A warp has
// 32 values of a row, and loads the values of MERGE_AHEAD splits at once, because each wait takes as long as a page of
// `attention_split`.  Reads (VALUE_HEAD + 2) * 4 bytes per row and split: after FINE_PAGES an eightieth of the reads of
// `attention_split`, with four rows.
#define MERGE_PARTS ((VALUE_HEAD + 31) / 32)
#define MERGE_AHEAD 8
extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS)
  attention_merge(PARAMETERS, const float* __restrict__ partial_sums, const float2* __restrict__ partial_states,
          int max_splits, int partial_rows, float* __restrict__ out, int out_stride,
          const float* __restrict__ sinks, int8_t* __restrict__ units, float2* __restrict__ scales, int n_rows) {
  const Batch batch = {header, starts, kv_lengths, ends, block_tables, block_stride};
  const Tile tile = find_tile(batch, blockIdx.z, ROWS, group_size, least, most);
  const int number = MERGE_WARPS * blockIdx.x + threadIdx.x / 32, row = number / MERGE_PARTS, kv_head = blockIdx.y;
  if (row >= tile.n_rows) return;
  const int part = number % MERGE_PARTS, column = 32 * part + threadIdx.x % 32;
  const Sight sight = sight_of(batch, tile, ROWS, group_size, window);
  const int n_splits = split_of(sight.last / PAGE) + 1 - split_of(sight.first / PAGE);
  const size_t first = (size_t)kv_head * max_splits * partial_rows + tile.partial_row + row;

  State total = {LOWEST, 0.0f};
  float sum = 0.0f;
  for (int split = 0; split < n_splits; split += MERGE_AHEAD) {
    float2 states[MERGE_AHEAD];
    float sums[MERGE_AHEAD];
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; i++) {
      const size_t at = first + (size_t)min(split + i, n_splits - 1) * partial_rows;
      states[i] = partial_states[at];
      sums[i] = column < VALUE_HEAD ? partial_sums[at * VALUE_HEAD + column] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; i++) {
      if (split + i >= n_splits) break;
      const Merge merge(total, {states[i].x, states[i].y});
      sum = merge.sum(sum, sums[i]);
    }
  }
  const int order = tile.first_row + row, head = kv_head * group_size + order % group_size;
  const float value = sum * share_of(total, sinks, head);
  if (VALUE_DIM % 32 == 0 && units)
    store_code(value, units, scales, head * MERGE_PARTS + part, tile.first_token + order / group_size, n_rows);
  else if (column < VALUE_DIM)
    out[place_of(tile, row, kv_head, group_size, out_stride, VALUE_DIM) + column] = value;
}
