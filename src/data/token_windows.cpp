#include <tessera/data/token_windows.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::data {

TokenWindows::TokenWindows(TokenFile file, int64_t length)
    : file_(std::move(file)), length_(length) {
  const ErrorSite site{.call = "TokenWindows", .path = file_.path().native()};
  if (length < 1) {
    raise<c10::ValueError>(
        site, fmt::format("windows of {} tokens. Give at least 1.", length));
  }
  size_ = (file_.size() - 1) / length; // a target after the last input
  if (file_.size() < 1 || size_ < 1) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "{} tokens have no window of {} and one more. Give more text, or a smaller length.",
            file_.size(),
            length));
  }
}

TokenWindows TokenWindows::spread(
    TokenFile file,
    int64_t length,
    int64_t count) {
  TokenWindows windows(std::move(file), length);
  if (count < 1) {
    raise<c10::ValueError>(
        {.call = "TokenWindows::spread", .path = windows.file_.path().native()},
        fmt::format("{} windows. Give 1 at least.", count));
  }
  windows.size_ = count;
  windows.is_spread_ = true;
  return windows;
}

std::string TokenWindows::name() const {
  return file_.path().native();
}

int64_t TokenWindows::start_of(int64_t index) const {
  if (!is_spread_) {
    return index * length_;
  }
  const int64_t last_start = file_.size() - length_ - 1;
  return size_ > 1 ? last_start * index / (size_ - 1) : 0;
}

TokenBatch TokenWindows::get(int64_t index) const {
  const TokenBatch rows = read(std::span(&index, 1));
  return {rows.inputs.select(0, 0), rows.targets.select(0, 0)};
}

TokenBatch TokenWindows::read(std::span<const int64_t> indices) const {
  const auto rows = static_cast<int64_t>(indices.size());
  TokenBatch batch{
      at::empty({rows, length_}, at::kLong),
      at::empty({rows, length_}, at::kLong)};
  auto* inputs = batch.inputs.mutable_data_ptr<int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<int64_t>();
  std::vector<int64_t> window(static_cast<size_t>(length_) + 1);
  for (const int64_t index : indices) {
    if (index < 0 || index >= size_) {
      raise<c10::IndexError>(
          {.call = "TokenWindows", .path = file_.path().native()},
          fmt::format("window {} of {}.", index, size_));
    }
    file_.read(start_of(index), window);
    inputs = std::copy(window.begin(), window.end() - 1, inputs);
    targets = std::copy(window.begin() + 1, window.end(), targets);
  }
  return batch;
}

} // namespace tessera::data
