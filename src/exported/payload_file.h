// An archive's file, open for reading its tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

#include "checkpoint/disk/input.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// Sizes and strides whose numbers are all written, as those of a Payload are.
std::vector<int64_t> written_numbers(
    const std::vector<Expression<int64_t>>& numbers);

/// Reads payloads. All calls throw checkpoint::FileError.
class PayloadFile {
 public:
  explicit PayloadFile(const std::filesystem::path& path);

  /// The bytes of a part of the file, in host memory.
  at::Tensor read(uint64_t offset, uint64_t size) const;

 private:
  std::filesystem::path path_;
  checkpoint::Input input_;
};

/// A tensor whose memory is `bytes`.
at::Tensor view_of(
    const at::Tensor& bytes,
    at::ScalarType dtype,
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    int64_t storage_offset);

} // namespace tessera::exported
