// An archive's file, open for reading its tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <unordered_map>

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

/// Copies tensors with the whole memory that they lie in, so that those that
/// share some share it again.
class MemoryCopies {
 public:
  explicit MemoryCopies(std::optional<at::Device> device) : device_(device) {}

  at::Tensor copy(const at::Tensor& tensor);

 private:
  std::optional<at::Device> device_; // if it is to be another
  std::unordered_map<const c10::StorageImpl*, at::Tensor> copies_; // bytes
};

namespace testing {
/// How many bytes of payloads this process has read.
uint64_t payload_bytes_read();
} // namespace testing

} // namespace tessera::exported
