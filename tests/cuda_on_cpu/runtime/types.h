// The types of PTX in C++, and the bits of floats.  A register is an unsigned integer of its width; a float is read from its bits.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between types of different sizes");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline f32 f32_of(u32 bits) { return bit_cast<f32>(bits); }
inline f64 f64_of(u64 bits) { return bit_cast<f64>(bits); }
inline u32 bits_of(f32 value) { return bit_cast<u32>(value); }
inline u64 bits_of(f64 value) { return bit_cast<u64>(value); }

// .ftz: a denormal f32 becomes a zero of its sign.
inline f32 flush(f32 value) {
  const u32 bits = bits_of(value);
  return f32_of(bits & (0x80000000u | -(u32)((bits & 0x7f800000u) != 0)));
}
