// ldmatrix, stmatrix, movmatrix and mma: fragments of small matrices, spread over the registers of a warp (PTX ISA, "Matrix
// fragments").  With g = lane / 4 and t = lane % 4, the fragments of all shapes here follow one rule.  A register of A, B
// holds PER elements along K, and four lanes with the same g hold a group of 4 * PER:
//   A[row][k]:  row = g + 8 * (register % (M / 8)),  k = PER * t + element + 4 * PER * (register / (M / 8))
//   B[k][col]:  col = g,                             k = PER * t + element + 4 * PER * register
//   C[row][col]: row = g + 8 * (i / 2),              col = 2 * t + i % 2          for accumulator i
#pragma once
#include "memory.h"
#include "rounding.h"

// What the registers hold; `value` reads element e of a register.
struct F16 {
  static constexpr int PER = 2;
  static f64 value(u32 bits, int e) { return f16_value((u16)(bits >> 16 * e)); }
};
struct BF16 {
  static constexpr int PER = 2;
  static f64 value(u32 bits, int e) { return bf16_value((u16)(bits >> 16 * e)); }
};
struct TF32 {
  static constexpr int PER = 1;
  static f64 value(u32 bits, int) { return f32_of(bits & ~0x1fffu); }
};
struct S8 {
  static constexpr int PER = 4;
  static s32 value(u32 bits, int e) { return (s8)(bits >> 8 * e); }
};
struct U8 {
  static constexpr int PER = 4;
  static s32 value(u32 bits, int e) { return (u8)(bits >> 8 * e); }
};

template <int A_REGISTERS, int B_REGISTERS, int ACCUMULATORS>
struct Fragments {
  u32 a[A_REGISTERS], b[B_REGISTERS], c[ACCUMULATORS];
};
template <int N>
struct Registers {
  u32 r[N];
};

template <class A, class B, int M, int K>
void multiply_fragments(Meeting& meeting);  // tensor.cpp

template <class A, class B, int M, int K, class In>
inline Registers<M / 4> mma(const In& in, int site) {
  return meet<In, Registers<M / 4>>(FULL_MASK, site, in, multiply_fragments<A, B, M, K>);
}

// ---- 8 x 8 matrices of 16-bit elements: matrix j's row i lies at the address that lane 8 * j + i gives
template <int N>
void spread_rows(Meeting& meeting, bool transposed) {
  typedef Registers<4> Row;
  if (meeting.arrived != FULL_MASK) fail("collective", "ldmatrix needs all 32 lanes, at <site %d>", meeting.site);
  for (int lane = 0; lane < WARP_SIZE; lane++)
    for (int j = 0; j < N; j++) {
      const int g = lane / 4, t = lane % 4;
      u32& out = output_of<Registers<N>>(meeting, lane).r[j];
      if (!transposed) {
        out = input_of<Row>(meeting, 8 * j + g).r[t];
        continue;
      }
      out = 0;
      for (int e = 0; e < 2; e++) {
        const u32 word = input_of<Row>(meeting, 8 * j + 2 * t + e).r[g / 2];
        out |= (word >> 16 * (g % 2) & 0xffff) << 16 * e;
      }
    }
}

template <int N, bool transposed>
inline Registers<N> load_matrix(u64 address, int site) {
  Registers<4> row{};
  if (current->lane < 8 * N) {  // the addresses of the other lanes are not used
    before_access(Space::shared, Access::read, address, 16, site);
    row = load<Registers<4>>(address);
  }
  return meet<Registers<4>, Registers<N>>(FULL_MASK, site, row, [](Meeting& meeting) { spread_rows<N>(meeting, transposed); });
}

template <int N, bool transposed>
inline void store_matrix(u64 address, const Registers<N>& fragment, int site) {
  typedef Registers<4> Row;
  struct Gather {
    static void combine(Meeting& meeting) {
      if (meeting.arrived != FULL_MASK) fail("collective", "stmatrix needs all 32 lanes, at <site %d>", meeting.site);
      for (int row = 0; row < 8 * N; row++)
        for (int col = 0; col < 8; col++) {
          const int g = transposed ? col : row % 8, c = transposed ? row % 8 : col;
          const u32 word = input_of<Registers<N>>(meeting, g * 4 + c / 2).r[row / 8];
          u32& out = output_of<Row>(meeting, row).r[col / 2];
          const u32 half = word >> 16 * (c % 2) & 0xffff;
          out = col % 2 ? out | half << 16 : half;
        }
    }
  };
  const Row row = meet<Registers<N>, Row>(FULL_MASK, site, fragment, Gather::combine);
  if (current->lane >= 8 * N) return;
  before_access(Space::shared, Access::write, address, 16, site);
  store<Row>(address, row);
}
