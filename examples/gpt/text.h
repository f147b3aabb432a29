#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>

namespace gpt {

struct Batch {
  at::Tensor inputs; // (rows, length) int64
  at::Tensor targets; // the same, each the byte that follows
};

/// The bytes of C++ headers, one file after another, and numbered windows into
/// them.
class Text {
 public:
  /// Reads the *.h below `folder` in the order of their paths until there are
  /// `enough` bytes. Throws std::runtime_error if there are none.
  static Text read_headers(const std::filesystem::path& folder, int64_t enough);

  /// Windows number `first` to `first + rows - 1`, a row each. A window's place
  /// depends on its number alone. So ranks that take the rows of a batch among
  /// themselves see together what one process with the whole batch sees.
  Batch windows(int64_t first, int64_t rows, int64_t length) const;

  int64_t num_bytes() const {
    return bytes_.numel();
  }
  int64_t num_files() const {
    return num_files_;
  }

 private:
  at::Tensor bytes_; // uint8
  int64_t num_files_ = 0;
};

} // namespace gpt
