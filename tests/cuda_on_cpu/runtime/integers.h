// Integer instructions of PTX that C++ has no operator for.
#pragma once
#include <type_traits>

#include "machine.h"

inline u32 prmt(u32 a, u32 b, u32 selector) {  // four bytes of the eight of b:a; bit 3 of a selector copies the byte's sign
  const u64 bytes = (u64)b << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 nibble = selector >> 4 * i & 15;
    u32 byte = (u32)(bytes >> 8 * (nibble & 7)) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

inline u32 lop3(u32 a, u32 b, u32 c, int table) {  // bit i of the table is the answer for (a, b, c) = the bits of i
  u32 result = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}

template <class U, bool is_signed>
inline U bit_field_extract(U value, u32 position, u32 length) {
  typedef typename std::make_signed<U>::type S;
  const u32 top = sizeof(U) * 8 - 1;
  position &= 255, length &= 255;
  U shifted = is_signed ? (U)((S)value >> (position < top ? position : top)) : position > top ? (U)0 : value >> position;
  if (length > top) return shifted;
  const U mask = ((U)1 << length) - 1;
  const u32 last = position + length - 1 < top ? position + length - 1 : top;
  const bool sign = is_signed && length && (value >> last & 1);
  return sign ? shifted | ~mask : shifted & mask;
}

template <class U>
inline U bit_field_insert(U from, U into, u32 position, u32 length) {
  const u32 bits = sizeof(U) * 8;
  position &= 255, length &= 255;
  if (position >= bits || length == 0) return into;
  const U ones = length >= bits ? ~(U)0 : ((U)1 << length) - 1;
  const U mask = ones << position;
  return (into & ~mask) | (from << position & mask);
}

template <bool left, bool wrap>
inline u32 funnel_shift(u32 low, u32 high, u32 count) {
  count = wrap ? count & 31 : (count > 32 ? 32 : count);
  const u64 both = (u64)high << 32 | low;
  return left ? (u32)(both << count >> 32) : (u32)(both >> count);
}

template <class U>
inline U reverse_bits(U value) {
  U result = 0;
  for (u32 i = 0; i < sizeof(U) * 8; i++) result |= (value >> i & 1) << (sizeof(U) * 8 - 1 - i);
  return result;
}

inline u32 leading_zeros(u32 value) { return value ? (u32)__builtin_clz(value) : 32; }
inline u32 leading_zeros(u64 value) { return value ? (u32)__builtin_clzll(value) : 64; }

// bfind: the place of the highest bit that differs from the sign, or -1; .shiftamt counts from the top.
template <class T>
inline u32 find_bit(T value, bool shift_amount) {
  typedef typename std::make_unsigned<T>::type U;
  const u32 zeros = leading_zeros(value < 0 ? ~(U)value : (U)value);
  const u32 bits = sizeof(T) * 8;
  if (zeros == bits) return 0xffffffffu;
  return shift_amount ? zeros : bits - 1 - zeros;
}

template <class T>
inline T shift_left(T value, u32 count) {
  return count >= sizeof(T) * 8 ? (T)0 : (T)(value << count);
}
template <class T>
inline T shift_right(T value, u32 count) {
  const u32 bits = sizeof(T) * 8;
  if (count >= bits) return value < 0 ? (T)-1 : (T)0;
  return (T)(value >> count);
}

// CUDA leaves the quotient by zero undefined; the lowest number by -1 wraps, where C++ would trap.
template <class T>
inline T divide(T a, T b, int site) {
  if (b == 0) fail("division by zero", "at <site %d>", site);
  return (T)-1 < 0 && b == (T)-1 ? (T)(0 - (u64)a) : (T)(a / b);
}
template <class T>
inline T remainder_of(T a, T b, int site) {
  if (b == 0) fail("division by zero", "at <site %d>", site);
  return (T)-1 < 0 && b == (T)-1 ? (T)0 : (T)(a % b);
}

// sad: |a - b| + c
template <class T, class U>
inline T add_difference(T a, T b, U c) {
  return (T)((a > b ? (U)a - (U)b : (U)b - (U)a) + c);
}

// The upper half of a product, of any width.
inline u32 mul_hi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline s32 mul_hi(s32 a, s32 b) { return (s32)((s64)a * b >> 32); }
inline u64 mul_hi(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
inline s64 mul_hi(s64 a, s64 b) { return (s64)((__int128)a * b >> 64); }
inline u16 mul_hi(u16 a, u16 b) { return (u16)((u32)a * b >> 16); }
inline s16 mul_hi(s16 a, s16 b) { return (s16)((s32)a * b >> 16); }

template <class A, class B>  // s8 or u8, four a register
inline u32 dot_4(u32 a, u32 b, u32 sum) {
  for (int i = 0; i < 4; i++) sum += (u32)((s32)(A)(a >> 8 * i) * (s32)(B)(b >> 8 * i));
  return sum;
}
template <class A, class B, bool high>  // dp2a: two 16-bit numbers with two bytes of b
inline u32 dot_2(u32 a, u32 b, u32 sum) {
  typedef typename std::conditional<std::is_signed<A>::value, s16, u16>::type A16;
  for (int i = 0; i < 2; i++) sum += (u32)((s32)(A16)(a >> 16 * i) * (s32)(B)(b >> 8 * (i + 2 * high)));
  return sum;
}

template <class Int>
inline Int clamp_int(__int128 value) {  // .sat
  const __int128 lowest = (Int)-1 < 0 ? -((__int128)1 << (sizeof(Int) * 8 - 1)) : 0;
  const __int128 highest = ((__int128)1 << (sizeof(Int) * 8 - ((Int)-1 < 0 ? 1 : 0))) - 1;
  return (Int)(value < lowest ? lowest : value > highest ? highest : value);
}
