// The formats of packed weights, one struct each.
//
// A matrix [n_out, n_in] is divided into groups of 32 rows, and a group into tiles of 128 columns, 256 in the K
// formats.  Padding rows and columns are zero.  A tile is a sequence of units of 16, 8, 4 or 2 bytes for each of its
// rows, row after row, so that a warp whose lanes are rows reads a unit at once:
//
//   [codes of the first 128 columns][codes of the second 128, in K formats][scales]
//
// codes.cuh shows the layout of codes.  The scales of a row's tile are the bytes of the scales of a file's blocks, in
// the largest possible units: 18 bytes are one unit of 16 and one of 2.  Every format takes the same number of bits per
// weight as in a file.
//
// The value of a code is d * code, or d * code + m; `block` returns d and m of a block of 32 columns (in some formats,
// of each half of a block).  To add a format, write the members that the templates here do not provide,
//
//   Codes                    how its codes are packed
//   SCALES, MINIMA           of a block: one for all columns, or two for 16 each; MINIMA may be 0
//   FILE_COLUMNS, FILE_BYTES of a block in files
//   SCALE_BYTES              of a row's tile
//   code(block, column)      a code in a file's block
//   scale_source(i)          where scale byte i of a row's tile is in the file's blocks
//   Raw, load                a row's scales, as stored in the tile
//   Run, run                 scales of 128 columns
//   block(run, b)            scales of 32 columns
//
// and add its name in kernels/cuda/matmul.py.
#pragma once
#include "codes.cuh"

template <int SCALES, int MINIMA>
struct BlockScales {
  float d[SCALES];
  float m[MINIMA ? MINIMA : 1];
};

// -- Reading tiles -------------------------------------------------------------------------------------------------

// Weights are used once: they are not stored in the first-level cache, which activations need.
struct Streamed {
  DEVICE uint4 load16(const void* place) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(place));
    return v;
  }
  DEVICE uint2 load8(const void* place) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(place));
    return v;
  }
  DEVICE uint32_t load4(const void* place) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(place));
    return v;
  }
  DEVICE uint16_t load2(const void* place) {
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(place));
    return v;
  }
};

// Normal loads, for all other data.
struct Plain {
  DEVICE uint4 load16(const void* place) { return *(const uint4*)place; }
  DEVICE uint2 load8(const void* place) { return *(const uint2*)place; }
  DEVICE uint32_t load4(const void* place) { return *(const uint32_t*)place; }
  DEVICE uint16_t load2(const void* place) { return *(const uint16_t*)place; }
};

// Byte i of a word, 0 ... 255, minus an offset: as the lowest byte of 2^23, which needs no conversion.
template <int OFFSET>
DEVICE float byte_to_float(uint32_t word, int i) {
  return __int_as_float((int)__byte_perm(word, 0x4b000000, 0x7550 | i)) - (8388608.0f + OFFSET);
}

// words[i].  A runtime index would move the array to memory.
template <int N>
DEVICE uint32_t pick(const uint32_t (&words)[N], int i) {
  uint32_t word = words[0];
#pragma unroll
  for (int n = 1; n < N; ++n) word = i == n ? words[n] : word;
  return word;
}

// -- Blocks of 32 columns ------------------------------------------------------------------------------------------

// Formats whose blocks start with SCALES scales and MINIMA minima, all float16, followed by the codes.
template <class CODES, int SCALES_, int MINIMA_>
struct Blocks32 {
  using Codes = CODES;
  static constexpr int SCALES = SCALES_, MINIMA = MINIMA_, RUNS = 1;
  static constexpr int HALVES = SCALES + MINIMA;
  static constexpr int FILE_COLUMNS = BLOCK, FILE_BYTES = 2 * HALVES + 4 * CODES::BITS;
  static constexpr int SCALE_BYTES = RUN_BLOCKS * 2 * HALVES;

  struct Raw {
    uint32_t words[2 * HALVES];
  };
  using Run = Raw;

  DEVICE int scale_source(int i) { return i / (2 * HALVES) * FILE_BYTES + i % (2 * HALVES); }

  DEVICE int nibble(const uint8_t* nibbles, int column) { return nibbles[column % 16] >> column / 16 * 4 & 15; }

  DEVICE int code(const uint8_t* block, int column) {
    const uint8_t* codes = block + 2 * HALVES;
    if constexpr (CODES::BITS == 8) return codes[column];
    if constexpr (CODES::BITS == 4) return nibble(codes, column);
    if constexpr (CODES::BITS == 3) {  // bit-packed: see quant/bit_packing.py
      const int v = column / 4, c = column % 4;
      if (v < 6) return codes[4 * (v % 3) + c] >> 3 * (v / 3) & 7;
      return codes[4 * (v - 6) + c] >> 6 | (codes[8 + c] >> v & 1) << 2;
    }
    return nibble(codes + 4, column) | (codes[column / 8] >> column % 8 & 1) << 4;  // fifth bits come first
  }

  template <class Memory>
  DEVICE Raw load(const uint8_t* scales, int row) {
    if constexpr (HALVES == 1) {
      const uint2 v = Memory::load8(scales + 8 * row);
      return {v.x, v.y};
    } else {
      const uint4 v = Memory::load16(scales + 16 * row);
      return {v.x, v.y, v.z, v.w};
    }
  }

  DEVICE Run run(const Raw& raw, int) { return raw; }

  DEVICE BlockScales<SCALES, MINIMA> block(const Run& scales, int b) {
    BlockScales<SCALES, MINIMA> s;
    if constexpr (HALVES == 1) {
      s.d[0] = low_half(pick(scales.words, b / 2) >> 16 * (b % 2)) * CODES::step();
    } else {
      const uint32_t word = pick(scales.words, b);
      s.d[0] = low_half(word) * CODES::step();
      const float other = high_half(word);
      if constexpr (MINIMA)
        s.m[0] = other;
      else
        s.d[1] = other * CODES::step();
    }
    return s;
  }
};

using Q4_0 = Blocks32<Codes<4, true>, 1, 0>;
using Q4_1 = Blocks32<Codes<4, false>, 1, 1>;
using Q5_0 = Blocks32<Codes<5, true>, 1, 0>;
using Q5_1 = Blocks32<Codes<5, false>, 1, 1>;
using Q8_0 = Blocks32<Codes<8, true>, 1, 0>;

#ifdef TABLE_2  // the table's 16 bytes, as words
using LUT_32 = Blocks32<TableCodes<TABLE_0, TABLE_1, TABLE_2, TABLE_3>, 1, 0>;
using LUT_16 = Blocks32<TableCodes<TABLE_0, TABLE_1, TABLE_2, TABLE_3>, 2, 0>;
#elif defined(TABLE_0)  // or 8 bytes
using LUT3_32 = Blocks32<TableCodes3<TABLE_0, TABLE_1>, 1, 0>;
using LUT3_16 = Blocks32<TableCodes3<TABLE_0, TABLE_1>, 2, 0>;
#endif

// -- K formats -----------------------------------------------------------------------------------------------------

// Q4_K and Q5_K: a six-bit scale and minimum for each 32 columns, times d and -dmin.
template <int BITS>
struct FineScales {
  using Codes = ::Codes<BITS, false>;
  static constexpr int SCALES = 1, MINIMA = 1, RUNS = 2;
  static constexpr int FILE_COLUMNS = 256, FILE_BYTES = 16 + 32 * BITS, SCALE_BYTES = 16;

  using Raw = uint4;  // d and dmin; then the twelve bytes shown in quant/kquants.py
  struct Run {
    uint32_t scales, minima;  // one byte per block
    float d, d_min;
  };

  DEVICE int scale_source(int i) { return i; }

  DEVICE int code(const uint8_t* block, int column) {
    const int run = column / 32, i = column % 32;
    const uint8_t* nibbles = block + FILE_BYTES - 128;
    const int low = nibbles[32 * (run / 2) + i] >> 4 * (run % 2) & 15;
    return BITS == 4 ? low : low | (block[16 + i] >> run & 1) << 4;
  }

  template <class Memory>
  DEVICE Raw load(const uint8_t* scales, int row) {
    return Memory::load16(scales + 16 * row);
  }

  DEVICE Run run(const Raw& raw, int run) {
    const uint32_t a = raw.y, b = raw.z, c = raw.w;
    Run s;
    s.scales = run ? (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030) : a & 0x3f3f3f3f;
    s.minima = run ? (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030) : b & 0x3f3f3f3f;
    s.d = low_half(raw.x);
    s.d_min = -high_half(raw.x);
    return s;
  }

  DEVICE BlockScales<1, 1> block(const Run& s, int b) {
    return {{s.d * byte_to_float<0>(s.scales, b)}, {s.d_min * byte_to_float<0>(s.minima, b)}};
  }
};

using Q4_K = FineScales<4>;
using Q5_K = FineScales<5>;

// The scales of 128 columns in formats with one scale per 16 columns: bytes with zero point OFFSET.
template <int OFFSET>
struct Sixteens {
  uint32_t scales[2];
  float d;

  __device__ __forceinline__ BlockScales<2, 0> block(int b) const {
    const uint32_t word = pick(scales, b / 2);
    const int i = b % 2 * 2;
    return {{d * byte_to_float<OFFSET>(word, i), d * byte_to_float<OFFSET>(word, i + 1)}, {0.0f}};
  }
};

struct Q6_K {
  using Codes = ::Codes<6, true>;
  static constexpr int SCALES = 2, MINIMA = 0, RUNS = 2;
  static constexpr int FILE_COLUMNS = 256, FILE_BYTES = 210, SCALE_BYTES = 18;

  struct Raw {
    uint4 scales;  // one signed byte per 16 columns
    uint16_t d;
  };
  using Run = Sixteens<128>;

  DEVICE int scale_source(int i) { return 192 + i; }

  DEVICE int code(const uint8_t* block, int column) {
    const int half = column / 128, run = column % 128 / 32, i = column % 32;
    const int low = block[64 * half + 32 * (run % 2) + i] >> 4 * (run / 2) & 15;
    return low | (block[128 + 32 * half + i] >> 2 * run & 3) << 4;
  }

  template <class Memory>
  DEVICE Raw load(const uint8_t* scales, int row) {
    return {Memory::load16(scales + 16 * row), Memory::load2(scales + 16 * GROUP + 2 * row)};
  }

  DEVICE Run run(const Raw& raw, int run) {
    // Minus -128, they are unsigned.
    return {{(run ? raw.scales.z : raw.scales.x) ^ 0x80808080, (run ? raw.scales.w : raw.scales.y) ^ 0x80808080},
            half_to_float(raw.d) * Codes::step()};
  }

  DEVICE BlockScales<2, 0> block(const Run& s, int b) { return s.block(b); }
};

struct Q3_K {
  using Codes = ::Codes<3, true>;
  static constexpr int SCALES = 2, MINIMA = 0, RUNS = 2;
  static constexpr int FILE_COLUMNS = 256, FILE_BYTES = 110, SCALE_BYTES = 14;

  struct Raw {
    uint32_t a, b, c;  // the twelve bytes shown in quant/kquants.py
    uint16_t d;
  };
  using Run = Sixteens<32>;

  DEVICE int scale_source(int i) { return 96 + i; }

  DEVICE int code(const uint8_t* block, int column) {
    const int half = column / 128, run = column % 128 / 32, i = column % 32;
    return (block[32 + 32 * half + i] >> 2 * run & 3) | (block[i] >> (4 * half + run) & 1) << 2;
  }

  template <class Memory>
  DEVICE Raw load(const uint8_t* scales, int row) {
    const uint2 ab = Memory::load8(scales + 8 * row);
    return {ab.x, ab.y, Memory::load4(scales + 8 * GROUP + 4 * row), Memory::load2(scales + 12 * GROUP + 2 * row)};
  }

  DEVICE Run run(const Raw& raw, int run) {
    const uint32_t a = raw.a >> 4 * run, b = raw.b >> 4 * run, c = raw.c >> 4 * run;
    return {{(a & 0x0f0f0f0f) | (c & 0x03030303) << 4, (b & 0x0f0f0f0f) | (c >> 2 & 0x03030303) << 4},
            half_to_float(raw.d) * Codes::step()};
  }

  DEVICE BlockScales<2, 0> block(const Run& s, int b) { return s.block(b); }
};

struct Q2_K {
  using Codes = ::Codes<2, false>;
  static constexpr int SCALES = 2, MINIMA = 2, RUNS = 2;
  static constexpr int FILE_COLUMNS = 256, FILE_BYTES = 84, SCALE_BYTES = 20;

  struct Raw {
    uint4 scales;  // for each 16 columns a scale in the low nibble and a minimum in the high nibble
    uint32_t d;    // and dmin
  };
  struct Run {
    uint32_t scales[2];
    float d, d_min;
  };

  DEVICE int scale_source(int i) { return i < 16 ? i : 64 + i; }

  DEVICE int code(const uint8_t* block, int column) {
    const int half = column / 128, run = column % 128 / 32, i = column % 32;
    return block[16 + 32 * half + i] >> 2 * run & 3;
  }

  template <class Memory>
  DEVICE Raw load(const uint8_t* scales, int row) {
    return {Memory::load16(scales + 16 * row), Memory::load4(scales + 16 * GROUP + 4 * row)};
  }

  DEVICE Run run(const Raw& raw, int run) {
    return {{run ? raw.scales.z : raw.scales.x, run ? raw.scales.w : raw.scales.y}, low_half(raw.d), -high_half(raw.d)};
  }

  DEVICE BlockScales<2, 2> block(const Run& s, int b) {
    const uint32_t word = pick(s.scales, b / 2), scales = word & 0x0f0f0f0f, minima = word >> 4 & 0x0f0f0f0f;
    const int i = b % 2 * 2;
    return {{s.d * byte_to_float<0>(scales, i), s.d * byte_to_float<0>(scales, i + 1)},
            {s.d_min * byte_to_float<0>(minima, i), s.d_min * byte_to_float<0>(minima, i + 1)}};
  }
};

// -- Floats --------------------------------------------------------------------------------------------------------

// Formats that are read like codes of BITS bits, without scales.
template <int BITS_>
struct Floats {
  struct Codes {
    static constexpr int BITS = BITS_;
  };
  static constexpr int RUNS = 1, SCALE_BYTES = 0;
};

// F16 and BF16 are stored as A operands of mma.m16n8k16: for each 16 columns, a tile stores a fragment of its first
// 16 rows and a fragment of its last 16 rows.  Lane 4 g + t has 16 bytes of a fragment: columns 2 t, 2 t + 1 of rows g
// and g + 8, and columns 8 + 2 t, 8 + 2 t + 1 of the same rows.
struct F16 : Floats<16> {
  DEVICE float to_float(uint16_t bits) { return half_to_float(bits); }
  DEVICE uint16_t from_float(float value) { return float_to_half(value); }
};

struct BF16 : Floats<16> {
  DEVICE float to_float(uint16_t bits) { return bfloat_to_float(bits); }
  DEVICE uint16_t from_float(float value) { return float_to_bfloat(value); }
};

// F32: units of four columns.
struct F32 : Floats<32> {};

constexpr int FRAGMENT_BYTES = UNIT * WARP;

template <class A, class B>
constexpr bool IS_SAME = false;
template <class A>
constexpr bool IS_SAME<A, A> = true;

template <class F>
constexpr bool IS_FLOAT = IS_SAME<F, F16> || IS_SAME<F, BF16> || IS_SAME<F, F32>;

// -- Sizes ---------------------------------------------------------------------------------------------------------

// Bytes, per group of rows, of the codes of 128 columns, of the scales of a tile, and of a tile.
template <class F>
constexpr int run_bytes() { return UNIT_BYTES * F::Codes::BITS; }

template <class F>
constexpr int scale_bytes() { return GROUP * F::SCALE_BYTES; }

template <class F>
constexpr int64_t tile_bytes() { return F::RUNS * run_bytes<F>() + scale_bytes<F>(); }

template <class F>
constexpr int runs() { return F::RUNS; }
