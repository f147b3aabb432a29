// CRC-32C (Castagnoli), the checksum of TFRecord files.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera {
namespace crc32c_detail {

inline constexpr uint32_t kPolynomial = 0x82F63B78; // bits reversed

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) {
      rest = (rest >> 1) ^ ((rest & 1) != 0 ? kPolynomial : 0);
    }
    table[byte] = rest;
  }
  return table;
}

inline constexpr std::array<uint32_t, 256> kTable = make_table();

} // namespace crc32c_detail

/// One byte at a time: for short records.
constexpr uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes) {
    const auto index = (crc ^ static_cast<uint8_t>(byte)) & 0xFF;
    crc = crc32c_detail::kTable[index] ^ (crc >> 8);
  }
  return ~crc;
}

/// As it stands in a file: a checksum of bytes that hold a plain checksum of
/// themselves would be weak.
constexpr uint32_t masked_crc32c(std::string_view bytes) {
  constexpr uint32_t kMaskDelta = 0xA282EAD8;
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + kMaskDelta;
}

} // namespace tessera
