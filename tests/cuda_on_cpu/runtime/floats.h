// Arithmetic on floats as PTX defines it, where C++ has no operator for it.
#pragma once
#include "rounding.h"

// ---- f32 and f64
template <Round mode>
inline f32 add_f32(f32 a, f32 b) {
  return mode == Round::nearest ? a + b : f32_from<mode>(add_to_odd(a, b));
}
template <Round mode>
inline f32 mul_f32(f32 a, f32 b) {
  return mode == Round::nearest ? a * b : f32_from<mode>((f64)a * b);
}
template <Round mode>
inline f32 fma_f32(f32 a, f32 b, f32 c) {
  return mode == Round::nearest ? fmaf(a, b, c) : f32_from<mode>(add_to_odd((f64)a * b, c));
}

// A number wins over a quiet NaN; with .NaN, NaN wins.  -0 is below +0.
template <class T>
[[gnu::noinline]] inline T min_float(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class T>
[[gnu::noinline]] inline T max_float(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
template <class T>
inline T min_nan(T a, T b) {
  return a != a || b != b ? (T)f32_of(0x7fffffff) : min_float(a, b);
}
template <class T>
inline T max_nan(T a, T b) {
  return a != a || b != b ? (T)f32_of(0x7fffffff) : max_float(a, b);
}
template <class T>
inline T saturate(T value) {  // .sat: into [0, 1], NaN becomes 0
  return value > 0 ? (value < 1 ? value : (T)1) : (T)0;
}
template <class T>
inline T relu(T value) {  // .relu: negatives become 0, NaN stays
  return value < 0 ? (T)0 : value;
}

// ---- f16 and bf16, stored as bits.  Products are exact in f64, and so are rounded once.
[[gnu::noinline]] inline u16 fma_f16(u16 a, u16 b, u16 c) { return f16_from(add_to_odd((f64)f16_value(a) * f16_value(b), f16_value(c))); }
[[gnu::noinline]] inline u16 add_f16(u16 a, u16 b) { return f16_from(f16_value(a) + f16_value(b)); }
[[gnu::noinline]] inline u16 sub_f16(u16 a, u16 b) { return f16_from(f16_value(a) - f16_value(b)); }
[[gnu::noinline]] inline u16 mul_f16(u16 a, u16 b) { return f16_from(f16_value(a) * f16_value(b)); }
inline u16 neg_f16(u16 a) { return a ^ 0x8000; }
inline u16 abs_f16(u16 a) { return a & 0x7fff; }
[[gnu::noinline]] inline u16 min_f16(u16 a, u16 b) { return f16_from(min_float(f16_value(a), f16_value(b))); }
[[gnu::noinline]] inline u16 max_f16(u16 a, u16 b) { return f16_from(max_float(f16_value(a), f16_value(b))); }
[[gnu::noinline]] inline u16 min_nan_f16(u16 a, u16 b) { return f16_from(min_nan(f16_value(a), f16_value(b))); }
[[gnu::noinline]] inline u16 max_nan_f16(u16 a, u16 b) { return f16_from(max_nan(f16_value(a), f16_value(b))); }
[[gnu::noinline]] inline u16 saturate_f16(u16 a) { return f16_from(saturate(f16_value(a))); }
[[gnu::noinline]] inline u16 relu_f16(u16 a) { return f16_from(relu(f16_value(a))); }
inline u16 flush_f16(u16 a) { return a & 0x7c00 ? a : a & 0x8000; }
[[gnu::noinline]] inline u16 ex2_f16(u16 a) { return f16_from(exp2((f64)f16_value(a))); }
[[gnu::noinline]] inline u16 tanh_f16(u16 a) { return f16_from(tanh((f64)f16_value(a))); }

[[gnu::noinline]] inline u16 fma_bf16(u16 a, u16 b, u16 c) { return bf16_from(add_to_odd((f64)bf16_value(a) * bf16_value(b), bf16_value(c))); }
[[gnu::noinline]] inline u16 add_bf16(u16 a, u16 b) { return bf16_from(add_to_odd(bf16_value(a), bf16_value(b))); }
[[gnu::noinline]] inline u16 sub_bf16(u16 a, u16 b) { return bf16_from(add_to_odd(bf16_value(a), -bf16_value(b))); }
[[gnu::noinline]] inline u16 mul_bf16(u16 a, u16 b) { return bf16_from((f64)bf16_value(a) * bf16_value(b)); }
inline u16 neg_bf16(u16 a) { return a ^ 0x8000; }
inline u16 abs_bf16(u16 a) { return a & 0x7fff; }
[[gnu::noinline]] inline u16 min_bf16(u16 a, u16 b) { return bf16_from(min_float(bf16_value(a), bf16_value(b))); }
[[gnu::noinline]] inline u16 max_bf16(u16 a, u16 b) { return bf16_from(max_float(bf16_value(a), bf16_value(b))); }
[[gnu::noinline]] inline u16 min_nan_bf16(u16 a, u16 b) { return bf16_from(min_nan(bf16_value(a), bf16_value(b))); }
[[gnu::noinline]] inline u16 max_nan_bf16(u16 a, u16 b) { return bf16_from(max_nan(bf16_value(a), bf16_value(b))); }
[[gnu::noinline]] inline u16 relu_bf16(u16 a) { return bf16_from(relu(bf16_value(a))); }
inline u16 flush_bf16(u16 a) { return a & 0x7f80 ? a : a & 0x8000; }
[[gnu::noinline]] inline u16 ex2_bf16(u16 a) { return bf16_from(exp2((f64)bf16_value(a))); }
[[gnu::noinline]] inline u16 tanh_bf16(u16 a) { return bf16_from(tanh((f64)bf16_value(a))); }

// ---- pairs (.f16x2, .bf16x2): the same on both halves of a register
template <class F, class... Pairs>
inline u32 each_half(F f, Pairs... pairs) {
  return (u32)f((u16)pairs...) | (u32)f((u16)(pairs >> 16)...) << 16;
}

// ---- to integers: clamped to the type; NaN is 0, or the lowest of its sign for 64 bits (PTX ISA, cvt)
template <class Int>
[[gnu::noinline]] inline Int int_from(f64 whole, bool wide_nan) {
  const f64 top = std::ldexp(1.0, (int)sizeof(Int) * 8 - ((Int)-1 < 0 ? 1 : 0));  // one above the largest
  const Int highest = (Int)-1 < 0 ? (Int)(((u64)1 << (sizeof(Int) * 8 - 1)) - 1) : (Int)-1;
  const Int lowest = (Int)-1 < 0 ? (Int)((u64)1 << (sizeof(Int) * 8 - 1)) : (Int)0;
  if (whole != whole) return wide_nan ? (Int)((u64)1 << (sizeof(Int) * 8 - 1)) : (Int)0;
  return whole >= top ? highest : whole <= (f64)lowest ? lowest : (Int)whole;
}
