// Narrowing a float to fewer bits in each of PTX's rounding modes.
//
// Results that need more bits than a double has (sums of far apart numbers) are first *rounded to odd*: cut off, with the last
// bit set if anything was lost.  Rounding such a value again, to at least two bits fewer, gives what rounding once would have.
#pragma once
#include "types.h"

enum class Round { nearest, zero, down, up };

// a + b, rounded to odd.
[[gnu::noinline]] inline f64 add_to_odd(f64 a, f64 b) {
  const f64 sum = a + b;
  const f64 b_part = sum - a;
  const f64 lost = (a - (sum - b_part)) + (b - b_part);  // Knuth's TwoSum: a + b = sum + lost, exactly
  const u64 bits = bits_of(sum);
  if (!std::isfinite(sum) || lost == 0 || (bits & 1)) return sum;
  return f64_of((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

// An f64 as f32, rounded to odd.
[[gnu::noinline]] inline f32 f32_to_odd(f64 value) {
  const f32 near = (f32)value;
  if ((f64)near == value || std::isnan(value) || std::isinf(value)) return near;
  const u32 bits = bits_of(near);
  return f32_of((std::fabs((f64)near) > std::fabs(value) ? bits - 1 : bits) | 1);
}

template <Round mode>
inline f32 f32_from(f64 value) {
  const f32 near = (f32)value;
  if (mode == Round::nearest || std::isnan(value) || (f64)near == value) return near;
  const bool above = (f64)near > value;
  if (mode == Round::down || (mode == Round::zero && value > 0)) return above ? std::nextafterf(near, -INFINITY) : near;
  return above ? near : std::nextafterf(near, INFINITY);
}

// ---- f16: the processor converts; NaN becomes PTX's canonical NaN.
constexpr u16 F16_NAN = 0x7fff;
inline f32 f16_value(u16 bits) { return (f32)bit_cast<_Float16>(bits); }

template <Round mode = Round::nearest>
[[gnu::noinline]] inline u16 f16_from(f32 value) {
  static_assert(mode == Round::nearest || mode == Round::zero, "f16 is rounded to nearest or to zero");
  if (value != value) return F16_NAN;
  const u16 near = bit_cast<u16>((_Float16)value);
  return mode == Round::zero && std::fabs(f16_value(near)) > std::fabs(value) ? (u16)(near - 1) : near;
}
template <Round mode = Round::nearest>
[[gnu::noinline]] inline u16 f16_from(f64 value) {
  return f16_from<mode>(f32_to_odd(value));
}

// ---- bf16: the upper half of an f32.
constexpr u16 BF16_NAN = 0x7fff;
inline f32 bf16_value(u16 bits) { return f32_of((u32)bits << 16); }

template <Round mode = Round::nearest>
inline u16 bf16_from(f32 value) {
  static_assert(mode == Round::nearest || mode == Round::zero, "bf16 is rounded to nearest or to zero");
  if (value != value) return BF16_NAN;
  const u32 bits = bits_of(value);
  return (u16)((mode == Round::zero ? bits : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <Round mode = Round::nearest>
inline u16 bf16_from(f64 value) {
  return bf16_from<mode>(f32_to_odd(value));
}

// ---- tf32: an f32 with 10 bits of fraction, ties away from zero (cvt.rna).
inline u32 tf32_from(f32 value) {
  const u32 bits = bits_of(value);
  return std::isfinite(value) ? (bits + 0x1000) & ~0x1fffu : bits;
}
