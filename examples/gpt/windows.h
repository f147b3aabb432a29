#pragma once

#include <torch/torch.h>

#include <cstdint>

#include "token_file.h"

namespace gpt {

struct Batch {
  torch::Tensor inputs; // (rows, length) int64
  torch::Tensor targets; // the same, each the token that follows
};

/// Numbered windows into a file of tokens. Each epoch goes through all of them
/// once, in an order of its own. Which window has number n depends only on n
/// and the seed: nothing has to be saved to resume in the middle of an epoch,
/// and ranks that take rows of a batch among themselves see together what one
/// process would see, however many they are.
class Windows {
 public:
  /// Throws std::runtime_error if the file is too short for a single window.
  Windows(TokenFile file, int64_t length, uint64_t seed);

  /// The number of windows in an epoch.
  int64_t size() const {
    return size_;
  }
  /// Numbers `first` to `first + rows - 1`, from 0 to infinity.
  Batch shuffled(int64_t first, int64_t rows) const;
  /// `rows` of `of` windows that are spread evenly over the file, from number
  /// `first`.
  Batch spread(int64_t first, int64_t rows, int64_t of) const;

 private:
  template <class Place>
  Batch read(int64_t rows, const Place& place) const;

  TokenFile file_;
  int64_t length_;
  int64_t size_;
  uint64_t seed_;
};

/// The place of `index` in a random order of 0 to size - 1 that `key`
/// determines; the order is never stored as a list.
int64_t shuffled_place(int64_t index, int64_t size, uint64_t key);

} // namespace gpt
