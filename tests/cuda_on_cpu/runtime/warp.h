// Instructions that the lanes of a warp carry out together.
#pragma once
#include "machine.h"

enum class Shuffle { up, down, butterfly, index };

struct ShuffleInput {
  u32 value, lane_or_distance, clamp;
};
struct ShuffleOutput {
  u32 value;
  bool in_range;
};

// Where lane `lane` reads from, and whether that is in range (PTX ISA, shfl.sync: clamp = segment mask << 8 | clamp value).
inline int shuffle_source(Shuffle mode, int lane, u32 distance, u32 clamp, bool& in_range) {
  const int segment = clamp >> 8 & 31, limit = clamp & 31, b = distance & 31;
  const int max_lane = (lane & segment) | (limit & ~segment);
  int source = lane;
  switch (mode) {
    case Shuffle::up: source = lane - b, in_range = source >= max_lane; break;
    case Shuffle::down: source = lane + b, in_range = source <= max_lane; break;
    case Shuffle::butterfly: source = lane ^ b, in_range = source <= max_lane; break;
    case Shuffle::index: source = (lane & segment) | (b & ~segment), in_range = source <= max_lane; break;
  }
  return in_range ? source : lane;
}

template <Shuffle mode>
inline ShuffleOutput shuffle(u32 value, u32 distance, u32 clamp, u32 mask, int site) {
  return meet<ShuffleInput, ShuffleOutput>(mask, site, {value, distance, clamp}, [](Meeting& meeting) {
    for (int lane = 0; lane < WARP_SIZE; lane++) {
      if (!(meeting.arrived >> lane & 1)) continue;
      const ShuffleInput& in = input_of<ShuffleInput>(meeting, lane);
      ShuffleOutput& out = output_of<ShuffleOutput>(meeting, lane);
      const int source = shuffle_source(mode, lane, in.lane_or_distance, in.clamp, out.in_range);
      if (!(meeting.arrived >> source & 1))
        fail("collective", "lane %d shuffles from lane %d, which is not there, at <site %d>", lane, source, meeting.site);
      out.value = input_of<ShuffleInput>(meeting, source).value;
    }
  });
}

// Folds the inputs of all lanes into one value that all get: vote, redux.
template <class T, class Fold>
inline T reduce(u32 mask, T value, int site, Fold fold) {
  return meet<T, T>(mask, site, value, [fold](Meeting& meeting) {
    bool first = true;
    T total{};
    for (int lane = 0; lane < WARP_SIZE; lane++) {
      if (!(meeting.arrived >> lane & 1)) continue;
      total = first ? input_of<T>(meeting, lane) : fold(total, input_of<T>(meeting, lane));
      first = false;
    }
    for (int lane = 0; lane < WARP_SIZE; lane++)
      if (meeting.arrived >> lane & 1) output_of<T>(meeting, lane) = total;
  });
}

inline u32 vote_ballot(u32 mask, bool value, int site) {
  return reduce<u32>(mask, value ? 1u << current->lane : 0, site, [](u32 a, u32 b) { return a | b; });
}
inline bool vote_any(u32 mask, bool value, int site) {
  return reduce<bool>(mask, value, site, [](bool a, bool b) { return a || b; });
}
inline bool vote_all(u32 mask, bool value, int site) {
  return reduce<bool>(mask, value, site, [](bool a, bool b) { return a && b; });
}
inline bool vote_uniform(u32 mask, bool value, int site) {
  const u32 yes = vote_ballot(mask, value, site);
  const u32 all = reduce<u32>(mask, 1u << current->lane, site, [](u32 a, u32 b) { return a | b; });
  return yes == 0 || yes == all;
}

template <class T>
inline u32 match_any(u32 mask, T value, int site) {  // the lanes that hold the same
  return meet<T, u32>(mask, site, value, [](Meeting& meeting) {
    for (int lane = 0; lane < WARP_SIZE; lane++) {
      if (!(meeting.arrived >> lane & 1)) continue;
      u32 same = 0;
      for (int other = 0; other < WARP_SIZE; other++)
        if (meeting.arrived >> other & 1 && input_of<T>(meeting, other) == input_of<T>(meeting, lane)) same |= 1u << other;
      output_of<u32>(meeting, lane) = same;
    }
  });
}
template <class T>
inline u32 match_all(u32 mask, T value, int site) {  // the mask if all hold the same, else 0
  const u32 same = match_any(mask, value, site);
  return same == mask ? mask : 0;
}
