#include "checkpoint/disk/source.h"

#include <algorithm>
#include <utility>

#include "checkpoint/disk/box_tiling.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/disk/openers.h"
#include "checkpoint/format/extent.h"
#include "checkpoint/format/format_error.h"

namespace tessera::checkpoint {

using format::in_quotes;

const char* name_of(Format format) {
  switch (format) {
    case Format::Dcp:
      return "DCP";
    case Format::Safetensors:
      return "safetensors";
    case Format::TorchFile:
      return "torch file";
    case Format::Exported:
      return "exported program";
  }
  return "?";
}

TensorBox whole_of(const std::vector<int64_t>& sizes) {
  return {.offsets = std::vector<int64_t>(sizes.size(), 0), .sizes = sizes};
}

std::optional<TensorBox> intersect(const TensorBox& a, const TensorBox& b) {
  TensorBox shared;
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    const int64_t begin = std::max(a.offsets[dim], b.offsets[dim]);
    const int64_t end =
        std::min(a.offsets[dim] + a.sizes[dim], b.offsets[dim] + b.sizes[dim]);
    if (begin >= end) {
      return std::nullopt;
    }
    shared.offsets.push_back(begin);
    shared.sizes.push_back(end - begin);
  }
  return shared;
}

int64_t StoredTensor::numel() const {
  return format::checked_numel(sizes).value();
}

uint64_t StoredTensor::bytes() const {
  return static_cast<uint64_t>(numel() * format::element_bytes(dtype));
}

const StoredTensor* Source::find_tensor(std::string_view name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

const StoredValue* Source::find_value(std::string_view name) const {
  const auto found = value_index_.find(name);
  return found == value_index_.end() ? nullptr : &values_[found->second];
}

UniqueFd Source::open_file(size_t file) const {
  const SourceFile& entry = files_.at(file);
  Input input = open_input(entry.path);
  if (input.bytes != entry.bytes) {
    throw FileError(
        quoted(entry.path) + ": it had " + std::to_string(entry.bytes) +
        " bytes when the checkpoint was opened and has " +
        std::to_string(input.bytes) + " now. Is it being written?");
  }
  return std::move(input.file);
}

size_t Source::add_file(const std::string& name) {
  fs::path path = resolve_below(root_, name);
  const uint64_t bytes = open_input(path).bytes;
  files_.push_back({.name = name, .bytes = bytes, .path = std::move(path)});
  return files_.size() - 1;
}

std::optional<Checksums> read_side_file(const fs::path& root) {
  const std::string name(kChecksumsName);
  if (!fs::exists(fs::symlink_status(root / name))) {
    return std::nullopt;
  }
  const fs::path path = resolve_below(root, name);
  const auto bytes = read_description(path);
  try {
    return read_checksums(format::as_text(bytes));
  } catch (const format::FormatError& error) {
    throw DamageError(
        quoted(path) + ": " + error.what() +
        ". `tessera ckpt verify` says whether the rest is sound.");
  }
}

namespace {

void compare_whole(
    const fs::path& root,
    const std::string& name,
    const FileSums& expected) {
  const fs::path path = resolve_below(root, name);
  if (sums_of(read_description(path)) != expected) {
    throw DamageError(
        quoted(path) +
        ": its bytes are not those that were written. Use another checkpoint.");
  }
}

} // namespace

void Source::use_checksums(const std::vector<std::string>& read_whole) {
  if (!checksums_) {
    checksums_ = read_side_file(root_);
  }
  if (!checksums_) {
    return;
  }
  const auto& sums = checksums_->files;
  // A file that was copied into the folder of another checkpoint.
  if (format() == Format::Safetensors && files_.size() == 1 &&
      !sums.contains(files_[0].name)) {
    checksums_.reset();
    return;
  }
  for (const auto& file : files_) {
    const auto found = sums.find(file.name);
    if (found == sums.end()) {
      throw DamageError(
          quoted(file.path) + ": not in " + std::string(kChecksumsName) +
          ". The folder holds files of two checkpoints; use another one.");
    }
    if (found->second.bytes != file.bytes) {
      throw DamageError(
          quoted(file.path) + ": " + std::to_string(file.bytes) + " bytes, " +
          std::to_string(found->second.bytes) +
          " were written. The file was cut off or changed; use another checkpoint.");
    }
  }
  for (const auto& name : read_whole) {
    const auto found = sums.find(name);
    if (found != sums.end()) {
      compare_whole(root_, name, found->second);
    }
  }
}

void Source::index() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto& tensor = tensors_[i];
    if (!tensor_index_.emplace(tensor.name, i).second) {
      throw FileError(
          quoted(path_) + ": two tensors are named " + in_quotes(tensor.name));
    }
    const auto why = why_not_covered(tensor.sizes, tensor.boxes);
    if (!why.empty()) {
      throw FileError(
          quoted(path_) + ": tensor " + in_quotes(tensor.name) + ": " + why);
    }
  }
  for (size_t i = 0; i < values_.size(); ++i) {
    const auto& name = values_[i].name;
    if (!value_index_.emplace(name, i).second || find_tensor(name)) {
      throw FileError(
          quoted(path_) + ": two entries are named " + in_quotes(name));
    }
  }
}

} // namespace tessera::checkpoint
