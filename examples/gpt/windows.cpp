#include "windows.h"

#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpt {
namespace {

/// Bits that depend on every bit of both (splitmix64's last steps).
uint64_t mixed(uint64_t value, uint64_t key) {
  value += key * 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

} // namespace

int64_t shuffled_place(int64_t index, int64_t size, uint64_t key) {
  // A Feistel network permutes the numbers of 2 * half bits, whatever `mixed`
  // does. Numbers beyond `size` are permuted again.
  const int half = (std::bit_width(static_cast<uint64_t>(size)) + 1) / 2;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto place = static_cast<uint64_t>(index);
  do {
    uint64_t left = place >> half;
    uint64_t right = place & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      left ^= mixed(right, key + round) & mask;
      std::swap(left, right);
    }
    place = left << half | right;
  } while (place >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(place);
}

Windows::Windows(TokenFile file, int64_t length, uint64_t seed)
    : file_(std::move(file)),
      length_(length),
      size_((file_.size() - 1) / length), // a target after the last input
      seed_(seed) {
  if (size_ < 1) {
    throw std::runtime_error(
        "a text of " + std::to_string(file_.size()) +
        " tokens has no window of " + std::to_string(length) +
        " and one more. Give more text, or a smaller --length.");
  }
}

template <class Place>
Batch Windows::read(int64_t rows, const Place& place) const {
  const auto ids = torch::empty({rows, length_ + 1}, torch::kLong);
  for (int64_t row = 0; row < rows; ++row) {
    auto* to = ids.data_ptr<int64_t>() + row * (length_ + 1);
    file_.read(place(row), {to, static_cast<size_t>(length_ + 1)});
  }
  return {
      ids.narrow(1, 0, length_).contiguous(),
      ids.narrow(1, 1, length_).contiguous()};
}

Batch Windows::shuffled(int64_t first, int64_t rows) const {
  return read(rows, [&](int64_t row) {
    const auto number = first + row;
    const auto epoch = static_cast<uint64_t>(number / size_);
    const auto key = mixed(seed_, epoch + 1);
    return shuffled_place(number % size_, size_, key) * length_;
  });
}

Batch Windows::spread(int64_t first, int64_t rows, int64_t of) const {
  const int64_t last_start = file_.size() - length_ - 1;
  return read(rows, [&](int64_t row) {
    return of > 1 ? last_start * (first + row) / (of - 1) : 0;
  });
}

} // namespace gpt
