#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace tessera::data {

/// A data set that makes whole batches itself.
template <class D>
concept ReadsBatches = requires(D& dataset, std::span<const int64_t> indices) {
  dataset.size();
  dataset.read(indices);
};

/// A data set that is read sample by sample, such as those of
/// torch::data::datasets.
template <class D>
concept ReadsSamples = requires(D& dataset, size_t index) {
  dataset.size();
  dataset.get(index);
};

/// The number of samples. LibTorch's data sets may not know it: 0.
template <class D>
int64_t num_samples(const D& dataset) {
  const auto size = dataset.size();
  if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(size)>>) {
    return static_cast<int64_t>(size);
  } else {
    return static_cast<int64_t>(size.value_or(0));
  }
}

} // namespace tessera::data
