// Data sets and files for tests of loaders.
#pragma once

#include <tessera/data/token_file.h>

#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/support.h"

namespace tessera::testing {

/// Sample i is a tensor with the one value i. Some samples can be made to throw
/// or to take longer.
struct Numbers {
  int64_t count = 0;
  std::set<int64_t> bad = {};
  bool is_uneven = false; // even samples take longer

  int64_t size() const {
    return count;
  }
  at::Tensor get(size_t index) const {
    const auto number = static_cast<int64_t>(index);
    if (bad.contains(number)) {
      throw std::runtime_error("the disk ate it");
    }
    if (is_uneven && number % 2 == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return torch::full({1}, number, torch::kLong);
  }
};

inline std::vector<int64_t> values_of(const at::Tensor& batch) {
  const at::Tensor flat = batch.to(torch::kCPU).contiguous().view({-1});
  const auto* data = flat.const_data_ptr<int64_t>();
  return {data, data + flat.numel()};
}

/// The rest of the epoch, batch by batch.
template <class Loader>
std::vector<std::vector<int64_t>> rest_of(Loader& loader) {
  std::vector<std::vector<int64_t>> batches;
  while (const auto batch = loader.next()) {
    batches.push_back(values_of(*batch));
  }
  return batches;
}

inline std::vector<int64_t> sorted(std::vector<int64_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}

inline std::vector<int64_t> joined(
    const std::vector<std::vector<int64_t>>& lists) {
  std::vector<int64_t> all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

inline std::vector<int64_t> first_numbers(int64_t count) {
  std::vector<int64_t> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

/// Tokens 0, 1, 2, ... of a vocabulary as large.
inline data::TokenFile counting_file(const fs::path& path, int64_t size) {
  data::TokenFileWriter writer(path, std::max<int64_t>(size, 1));
  writer.append(first_numbers(size));
  writer.close();
  return data::TokenFile(path);
}

/// What all ranks have, one after another. Collective.
inline std::vector<int64_t> of_all_ranks(
    const Group& group,
    const std::vector<int64_t>& mine) {
  const auto bytes = group.all_gather_bytes(
      {reinterpret_cast<const uint8_t*>(mine.data()),
       mine.size() * sizeof(int64_t)});
  std::vector<int64_t> all;
  for (const auto& part : bytes) {
    std::vector<int64_t> values(part.size() / sizeof(int64_t));
    std::memcpy(values.data(), part.data(), part.size());
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

} // namespace tessera::testing
