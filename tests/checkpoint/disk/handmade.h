// DCP folders made by hand, good and bad ones.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/block_reader.h"
#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/read_region.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/support.h"
#include "checkpoint/format/zip_archive.h"

namespace tessera::checkpoint {

using format::DType;

/// A torch file, with one storage.
inline std::string torch_file(
    const format::Value& value,
    const std::string& storage = "") {
  format::ZipArchive archive;
  archive.entries.push_back(
      {.name = "archive/data.pkl", .data = format::write_pickle(value)});
  archive.entries.push_back({.name = "archive/data/0", .data = storage});
  archive.entries.push_back({.name = "archive/version", .data = "3\n"});
  return archive.bytes();
}

/// The elements 0, 1, 2, ... as float32.
inline std::string counting(int64_t begin, int64_t count) {
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) {
    format::append_number(&bytes, static_cast<float>(begin + i));
  }
  return bytes;
}

inline std::vector<int64_t> row_major(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  return strides;
}

inline format::Tensor float_tensor(std::vector<int64_t> sizes, int64_t numel) {
  format::Tensor tensor;
  tensor.storage = {
      .key = "0", .dtype = DType::Float32, .location = "cpu", .numel = numel};
  tensor.strides = row_major(sizes);
  tensor.sizes = std::move(sizes);
  return tensor;
}

/// A folder with one tensor "w" of float32, whose elements count up, in the
/// boxes that are added. Change `metadata` before write().
class HandmadeDcp {
 public:
  HandmadeDcp(std::filesystem::path folder, std::vector<int64_t> sizes)
      : folder_(std::move(folder)) {
    metadata.tensors.push_back(
        {.name = "w", .dtype = DType::Float32, .sizes = std::move(sizes)});
    metadata.version = "1.0.0";
    std::filesystem::create_directory(folder_);
  }

  /// A box that is whole rows of the tensor, in a file of its own.
  void add_rows(const std::string& file, int64_t begin, int64_t count) {
    auto offsets = std::vector<int64_t>(tensor().sizes.size(), 0);
    auto sizes = tensor().sizes;
    offsets[0] = begin;
    sizes[0] = count;
    int64_t row = 1;
    for (size_t dim = 1; dim < sizes.size(); ++dim) {
      row *= sizes[dim];
    }
    add_item(
        file,
        offsets,
        sizes,
        torch_file(
            float_tensor(sizes, row * count),
            counting(begin * row, row * count)));
  }

  void add_item(
      const std::string& file,
      const std::vector<int64_t>& offsets,
      const std::vector<int64_t>& sizes,
      const std::string& item) {
    format::write_file(folder_ / file, item);
    tensor().chunks.push_back(
        {.offsets = offsets,
         .sizes = sizes,
         .storage = format::DcpStorage{
             .file = file,
             .offset = 0,
             .length = static_cast<int64_t>(item.size())}});
  }

  format::DcpTensor& tensor() {
    return metadata.tensors[0];
  }

  void write() const {
    format::write_file(
        folder_ / ".metadata", format::write_dcp_metadata(metadata));
  }

  /// As Tessera does.
  void write_checksums() const {
    Checksums sums;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const std::string bytes = format::read_file(entry.path());
      sums.files[entry.path().filename()] = sums_of(format::as_bytes(bytes));
    }
    format::write_file(
        folder_ / std::string(kChecksumsName),
        checkpoint::write_checksums(sums));
  }

  format::DcpMetadata metadata;

 private:
  std::filesystem::path folder_;
};

/// All elements of a tensor, row by row.
inline std::string read_tensor(const Source& source, const std::string& name) {
  const StoredTensor* tensor = source.find_tensor(name);
  if (!tensor) {
    throw std::runtime_error("no tensor " + name);
  }
  const int64_t element = format::element_bytes(tensor->dtype);
  std::vector<int64_t> strides = row_major(tensor->sizes);
  for (auto& stride : strides) {
    stride *= element;
  }
  std::string bytes(tensor->bytes(), '\xee');
  BlockReader reader(source);
  for (const auto& box : tensor->boxes) {
    int64_t to = 0;
    for (size_t dim = 0; dim < strides.size(); ++dim) {
      to += box.offsets[dim] * strides[dim];
    }
    read_region(
        reader,
        *tensor,
        box,
        source.locate(*tensor, box),
        box.offsets,
        box.sizes,
        reinterpret_cast<uint8_t*>(bytes.data()) + to,
        strides);
  }
  return bytes;
}

} // namespace tessera::checkpoint
