#include "backend/cpu/linear/quant_pack.h"

#include <cstring>

#include "backend/cpu/half.h"

namespace specdec::cpu {
namespace {

// Scale or minimum number `set` of a column.
std::int64_t scale_offset(const QuantFormat& format, int set, int column) {
  return format.codes_bytes() + (set * 32 + column) * (format.wide_scales ? 4 : 2);
}

void put_scale(const QuantFormat& format, float value, int set, int column, std::byte* step) {
  std::byte* to = step + scale_offset(format, set, column);
  if (format.wide_scales) {
    std::memcpy(to, &value, sizeof(value));
  } else {
    const std::uint16_t bits = float_to_f16(value);  // it was one: exact
    std::memcpy(to, &bits, sizeof(bits));
  }
}

float scale_at(const QuantFormat& format, int set, int column, const std::byte* step) {
  const std::byte* from = step + scale_offset(format, set, column);
  if (format.wide_scales) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return f16_to_float(bits);
}

}  // namespace

void pack_group(WeightType type, const Group& group, int column, std::byte* step) {
  const QuantFormat format = quant_format(type);
  const int count = format.nibbles ? 16 : kGroup;
  std::uint8_t codes[kGroup];
  for (int k = 0; k < count; ++k) {
    const int code = format.nibbles ? group.codes[k] | group.codes[k + 16] << 4 : group.codes[k];
    codes[k] = static_cast<std::uint8_t>(code);
  }
  // Four at a time: single bytes, far apart, took most of the time of loading a model.
  for (int k = 0; k < count; k += 4) std::memcpy(step + k / 4 * 128 + 4 * column, codes + k, 4);
  const int sets = format.two_scales ? 2 : 1;
  for (int set = 0; set < sets; ++set) put_scale(format, group.scale[set], set, column, step);
  if (format.has_min) put_scale(format, group.min, sets, column, step);
}

Group unpack_group(WeightType type, const std::byte* step, int column) {
  const QuantFormat format = quant_format(type);
  Group group;
  for (int k = 0; k < (format.nibbles ? 16 : kGroup); ++k) {
    const auto code = static_cast<std::uint8_t>(step[k / 4 * 128 + 4 * column + k % 4]);
    group.codes[k] = format.nibbles ? code & 15 : code;
    if (format.nibbles) group.codes[k + 16] = code >> 4;
  }
  const int sets = format.two_scales ? 2 : 1;
  group.scale[0] = scale_at(format, 0, column, step);
  group.scale[1] = scale_at(format, sets - 1, column, step);
  group.min = format.has_min ? scale_at(format, sets, column, step) : 0.0f;
  return group;
}

}  // namespace specdec::cpu
