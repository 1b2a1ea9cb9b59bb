#include "backend/cpu/linear/weight_type.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/e4m3.h"
#include "backend/cpu/half.h"
#include "base/check.h"

namespace specdec::cpu {
namespace {

constexpr WeightType kFormats[] = {WeightType::kQ8_0, WeightType::kQ4_0, WeightType::kQ4_1,
                                   WeightType::kQ5_0, WeightType::kQ5_1, WeightType::kQ4K,
                                   WeightType::kQ5K,  WeightType::kQ6K,  WeightType::kQ4G,
                                   WeightType::kQ8G,  WeightType::kF8G,  WeightType::kF8A8};

const std::uint8_t* bytes_of(const std::byte* p) {
  return reinterpret_cast<const std::uint8_t*>(p);
}

float half_at(const std::uint8_t* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return f16_to_float(bits);
}

float float_at(const std::uint8_t* p) {
  float value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// Low nibbles are the first 16 elements, high nibbles the last.
void split_nibbles(const std::uint8_t* packed, std::uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = packed[i] & 15;
    codes[16 + i] = packed[i] >> 4;
  }
}

// q5_0: d, 32 fifth bits, nibbles; u - 16 of it, which is kept as q8_0 keeps it, plus 128. q5_1 has
// a minimum behind d.
Group read_q5(const std::uint8_t* block, bool has_min) {
  Group group;
  group.scale[0] = group.scale[1] = half_at(block);
  group.min = has_min ? half_at(block + 2) : 0.0f;
  const std::uint8_t* fifth = block + (has_min ? 4 : 2);
  split_nibbles(fifth + 4, group.codes);
  for (int i = 0; i < kGroup; ++i) {
    const int code = group.codes[i] | (fifth[i / 8] >> (i % 8) & 1) << 4;
    group.codes[i] = static_cast<std::uint8_t>(has_min ? code : code - 16 + 128);
  }
  return group;
}

// Scale and minimum of group `g` of 8 in q4_k and q5_k: 6 bits each, in 12 bytes.
void six_bit_pair(const std::uint8_t* packed, int g, int& scale, int& min) {
  if (g < 4) {
    scale = packed[g] & 63;
    min = packed[g + 4] & 63;
  } else {
    scale = (packed[g + 4] & 15) | ((packed[g - 4] >> 6) << 4);
    min = (packed[g + 4] >> 4) | ((packed[g] >> 6) << 4);
  }
}

// q4_k: d, dmin, 12 bytes of scales, 128 of nibbles. q5_k has 32 bytes of fifth bits before these.
Group read_k45(const std::uint8_t* block, int g, bool has_fifth_bits) {
  Group group;
  int scale, min;
  six_bit_pair(block + 4, g, scale, min);
  group.scale[0] = group.scale[1] = half_at(block) * static_cast<float>(scale);
  group.min = -(half_at(block + 2) * static_cast<float>(min));
  const std::uint8_t* fifth = block + 16;
  const std::uint8_t* nibbles = block + (has_fifth_bits ? 48 : 16) + 32 * (g / 2);
  for (int i = 0; i < kGroup; ++i) {
    const int low = g % 2 == 0 ? nibbles[i] & 15 : nibbles[i] >> 4;
    const int high = has_fifth_bits ? (fifth[i] >> g & 1) << 4 : 0;
    group.codes[i] = static_cast<std::uint8_t>(low | high);
  }
  return group;
}

// q6_k: 128 bytes of nibbles, 64 of upper pairs of bits, 16 signed scales, d.
Group read_k6(const std::uint8_t* block, int g) {
  Group group;
  const int half = g / 4, quarter = g % 4;
  const std::uint8_t* nibbles = block + 64 * half + 32 * (quarter % 2);
  const std::uint8_t* pairs = block + 128 + 32 * half;
  const std::uint8_t* scales = block + 192 + 8 * half + 2 * quarter;
  const float d = half_at(block + 208);
  for (int s = 0; s < 2; ++s) {
    group.scale[s] = d * static_cast<float>(static_cast<std::int8_t>(scales[s]));
  }
  group.min = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const int low = quarter < 2 ? nibbles[i] & 15 : nibbles[i] >> 4;
    group.codes[i] = static_cast<std::uint8_t>(low | (pairs[i] >> (2 * quarter) & 3) << 4);
  }
  return group;
}

}  // namespace

const char* weight_type_name(WeightType type) {
  switch (type) {
    case WeightType::kQ8_0:
      return "q8_0";
    case WeightType::kQ4_0:
      return "q4_0";
    case WeightType::kQ4_1:
      return "q4_1";
    case WeightType::kQ5_0:
      return "q5_0";
    case WeightType::kQ5_1:
      return "q5_1";
    case WeightType::kQ4K:
      return "q4_k";
    case WeightType::kQ5K:
      return "q5_k";
    case WeightType::kQ6K:
      return "q6_k";
    case WeightType::kQ4G:
      return "q4_g";
    case WeightType::kQ8G:
      return "q8_g";
    case WeightType::kF8G:
      return "f8_g";
    case WeightType::kF8A8:
      return "f8_a8";
    default:
      return dtype_name(float_dtype(type));
  }
}

WeightType block_format_named(const std::string& name) {
  for (WeightType type : kFormats) {
    if (name == weight_type_name(type)) return type;
  }
  SPECDEC_REQUIRE(
      false, "weight type '", name,
      "': give q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q4_g, q8_g, f8_g or f8_a8");
  return WeightType::kQ8_0;
}

BlockSize block_size(WeightType type) {
  switch (type) {
    case WeightType::kQ8_0:
      return {32, 34};
    case WeightType::kQ4_0:
      return {32, 18};
    case WeightType::kQ4_1:
      return {32, 20};
    case WeightType::kQ5_0:
      return {32, 22};
    case WeightType::kQ5_1:
      return {32, 24};
    case WeightType::kQ4K:
      return {256, 144};
    case WeightType::kQ5K:
      return {256, 176};
    case WeightType::kQ6K:
      return {256, 210};
    case WeightType::kQ4G:
      return {32, 24};
    case WeightType::kQ8G:
      return {32, 36};
    case WeightType::kF8G:
    case WeightType::kF8A8:
      return {kScaledGroup, kScaledGroup + 4};
    default:
      return {1, static_cast<std::int64_t>(dtype_bytes(float_dtype(type)))};
  }
}

Group read_group(WeightType type, const std::byte* row, std::int64_t index) {
  const BlockSize size = block_size(type);
  const std::int64_t groups = size.elements / kGroup;
  const std::uint8_t* block = bytes_of(row) + index / groups * size.bytes;
  const int g = static_cast<int>(index % groups);
  if (type == WeightType::kQ6K) return read_k6(block, g);
  if (type == WeightType::kQ4K || type == WeightType::kQ5K) {
    return read_k45(block, g, type == WeightType::kQ5K);
  }
  if (type == WeightType::kQ5_0 || type == WeightType::kQ5_1) {
    return read_q5(block, type == WeightType::kQ5_1);
  }
  Group group;
  if (is_e4m3(type)) {
    group.scale[0] = group.scale[1] = float_at(block);
    group.min = 0.0f;
    std::copy_n(block + 4 + index % groups * kGroup, kGroup, group.codes);
    return group;
  }
  if (type == WeightType::kQ4G || type == WeightType::kQ8G) {
    group.scale[0] = group.scale[1] = float_at(block);
    group.min = type == WeightType::kQ4G ? float_at(block + 4) : 0.0f;
    if (type == WeightType::kQ4G) {
      split_nibbles(block + 8, group.codes);
    } else {
      for (int i = 0; i < kGroup; ++i) group.codes[i] = block[4 + i] ^ 0x80;  // q + 128
    }
    return group;
  }
  group.scale[0] = group.scale[1] = half_at(block);
  group.min = type == WeightType::kQ4_1 ? half_at(block + 2) : 0.0f;
  if (type == WeightType::kQ8_0) {
    for (int i = 0; i < kGroup; ++i) group.codes[i] = block[2 + i] ^ 0x80;  // q + 128
  } else {
    split_nibbles(block + (type == WeightType::kQ4_1 ? 4 : 2), group.codes);
  }
  return group;
}

void group_values(WeightType type, const Group& group, float* out) {
  if (is_e4m3(type)) {
    for (int i = 0; i < kGroup; ++i) out[i] = group.scale[0] * e4m3_to_float(group.codes[i]);
    return;
  }
  const QuantFormat format = quant_format(type);
  for (int i = 0; i < kGroup; ++i) {
    const float product =
        group.scale[i / 16] * static_cast<float>(int{group.codes[i]} - format.zero());
    out[i] = format.has_min ? product + group.min : product;
  }
}

}  // namespace specdec::cpu
