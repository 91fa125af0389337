// Layout of the codes of 32 columns in a packed matrix, and their conversion to bytes for integer dot products.
//
// A row's codes of 128 columns, a *run*, take one *unit* of 16 bytes per bit of a code.  A run has four blocks of 32
// columns, in order: first the units with whole nibbles or bytes of all four blocks, and then, packed into units, the
// *row words* with the remaining bits:
//
//   bits   units a block                                     row words a block
//   4      1: byte j = code of column j in the low nibble,   none
//          and of column 16 + j in the high nibble
//   5      1: lower four bits of the codes, in this order    1: bit 8 c + t = bit 4 of column 4 t + c, t = 0 ... 7
//   6      1                                                 2: bits 8 c + 2 t of word i = bits 4, 5 of column
//                                                               16 i + 4 t + c, t = 0 ... 3
//   2      none                                              2: bits 0, 1 in this order
//   3      none                                              3: bits 0, 1 in this order; bit 8 c + t of the third
//                                                               word = bit 2 of column 4 t + c
//   8      2: columns 0 ... 15, 16 ... 31                    none
//
// Words t of a block's units, with its row words, therefore contain the codes of columns 4 t ... 4 t + 3 and 16 + 4 t
// ... 16 + 4 t + 3, which lane 4 g + t of a warp needs for row g in an `mma`.
#pragma once
#include "common.cuh"

// Columns 4 t ... 4 t + 3 and 16 + 4 t ... 16 + 4 t + 3 of a block, one signed byte each.
struct CodePair {
  uint32_t low, high;
};

constexpr int BLOCK = 32;             // columns that share scales of activations
constexpr int RUN = 128;              // columns whose codes are contiguous
constexpr int RUN_BLOCKS = RUN / BLOCK;
constexpr int GROUP = 32;             // rows of a group, stored row after row in each unit
constexpr int UNIT = 16;              // consecutive bytes of a row
constexpr int UNIT_BYTES = GROUP * UNIT;

// Codes of BITS_ bits.  For SIGNED codes half their range is subtracted, which flips their highest bit; they become the
// highest bits of a byte, so that the byte has the code's sign.
template <int BITS_, bool SIGNED>
struct Codes {
  static constexpr int BITS = BITS_;
  static constexpr int UNITS = BITS / 4;
  static constexpr int ROW_WORDS = BITS % 4;
  static constexpr int SHIFT = SIGNED && BITS < 8 ? 8 - BITS : 0;
  // The codes' values are the bytes times this.
  DEVICE float step() { return 1.0f / (1 << SHIFT); }

  // q: word t of each unit.  rows: the row words.
  DEVICE CodePair unpack(const uint32_t* q, const uint32_t* rows, int t) {
    CodePair pair;
    if constexpr (BITS == 8) return {q[0], q[1]};
    if constexpr (UNITS == 1) {
      pair.low = q[0] << SHIFT & 0x0f0f0f0fu << SHIFT;
      pair.high = (SHIFT == 4 ? q[0] : q[0] >> (4 - SHIFT)) & 0x0f0f0f0fu << SHIFT;
    } else {
      pair.low = (rows[0] >> 2 * t & 0x03030303) << SHIFT;
      pair.high = (rows[1] >> 2 * t & 0x03030303) << SHIFT;
    }
    if constexpr (BITS == 6) {
      pair.low |= (rows[0] >> 2 * t & 0x03030303) << (4 + SHIFT);
      pair.high |= (rows[1] >> 2 * t & 0x03030303) << (4 + SHIFT);
    }
    if constexpr (BITS == 5 || BITS == 3) {  // the highest bit
      const uint32_t word = rows[ROW_WORDS - 1];
      pair.low |= (word >> t & 0x01010101) << (BITS - 1 + SHIFT);
      pair.high |= (word >> (4 + t) & 0x01010101) << (BITS - 1 + SHIFT);
    }
    if constexpr (SIGNED) {
      pair.low ^= 0x80808080;
      pair.high ^= 0x80808080;
    }
    return pair;
  }

  // The inverse: word t of unit u of a block with these codes.
  DEVICE uint32_t unit_word(const uint8_t (&codes)[BLOCK], int u, int t) {
    uint32_t word = 0;
    for (int c = 0; c < 4; ++c) {
      const int low = codes[(BITS == 8 ? 16 * u : 0) + 4 * t + c], high = codes[16 + 4 * t + c];
      word |= (BITS == 8 ? low : (low & 15) | (high & 15) << 4) << 8 * c;
    }
    return word;
  }

  // The inverse: row word i.
  DEVICE uint32_t row_word(const uint8_t (&codes)[BLOCK], int i) {
    uint32_t word = 0;
    const bool single = BITS == 5 || i == 2;  // one bit of each of 32 columns, or two of each of 16
    for (int column = 0; column < (single ? 32 : 16); ++column) {
      const int t = column / 4, c = column % 4;
      if (single)
        word |= (uint32_t)(codes[column] >> (BITS - 1) & 1) << (8 * c + t);
      else
        word |= (uint32_t)(codes[16 * i + column] >> (BITS == 6 ? 4 : 0) & 3) << (8 * c + 2 * t);
    }
    return word;
  }
};

// Four-bit indices into a table of 16 signed bytes.
template <uint32_t T0, uint32_t T1, uint32_t T2, uint32_t T3>
struct TableCodes : Codes<4, false> {
  DEVICE CodePair unpack(const uint32_t* q, const uint32_t*, int) {
    // A byte permutation selects from 8 bytes: one for each half of the table, and a third one between their results.
    const uint32_t places = q[0] & 0x77777777, halves = 0x32103210 | (q[0] & 0x88888888) >> 1;
    uint32_t mixed[2];  // columns 4 t, 16 + 4 t, 4 t + 1, 16 + 4 t + 1; and the remaining two of each
    for (int i = 0; i < 2; ++i) {
      const uint32_t first = __byte_perm(T0, T1, places >> 16 * i), second = __byte_perm(T2, T3, places >> 16 * i);
      mixed[i] = __byte_perm(first, second, halves >> 16 * i);
    }
    return {__byte_perm(mixed[0], mixed[1], 0x6420), __byte_perm(mixed[0], mixed[1], 0x7531)};
  }
};

// Three-bit indices into a table of 8 signed bytes.
template <uint32_t T0, uint32_t T1>
struct TableCodes3 : Codes<3, false> {
  DEVICE uint32_t look_up(uint32_t places) {  // a byte permutation takes its four indices from four nibbles
    const uint32_t pairs = places | places >> 4;
    return __byte_perm(T0, T1, (pairs & 0xff) | (pairs >> 8 & 0xff00));
  }
  DEVICE CodePair unpack(const uint32_t* q, const uint32_t* rows, int t) {
    const CodePair places = Codes<3, false>::unpack(q, rows, t);
    return {look_up(places.low), look_up(places.high)};
  }
};
