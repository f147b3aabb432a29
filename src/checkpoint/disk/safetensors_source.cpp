// safetensors: one file, or several with an index; docs/formats/safetensors.md.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/block_reader.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/disk/openers.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/safetensors_index.h"

namespace tessera::checkpoint {
namespace {

using format::in_quotes;

class SafetensorsSource : public Source {
 public:
  explicit SafetensorsSource(const OpenedPath& at) {
    path_ = at.path;
    root_ = at.root;
  }

  Format format() const override {
    return Format::Safetensors;
  }

  void read_one(const OpenedPath& at) {
    const size_t file = add_file(at.name);
    for (const auto& tensor : read_header(file).tensors) {
      add_tensor(tensor, file);
    }
    finish(at, {});
  }

  void read_indexed(const OpenedPath& at) {
    const auto index = read_index(at.name);
    std::map<std::string, std::vector<format::SafeTensor>> in_files;
    for (const auto& [tensor, name] : index.files) {
      in_files.try_emplace(name);
    }
    std::map<std::string, size_t> left; // of the index: found in which file
    for (auto& [name, tensors] : in_files) {
      const size_t file = add_file(name);
      for (const auto& tensor : read_header(file).tensors) {
        // A shared tensor may be in several files: the index says which one
        // counts.
        const auto entry = index.files.find(tensor.name);
        if (entry == index.files.end() || entry->second == name) {
          add_tensor(tensor, file);
          left.emplace(tensor.name, file);
        }
      }
    }
    for (const auto& [tensor, name] : index.files) {
      if (!left.contains(tensor)) {
        throw FileError(
            quoted(root_ / name) + ": tensor " + in_quotes(tensor) +
            " is not in it, although " + in_quotes(at.name) +
            " lists it. The files are not of one checkpoint; copy the checkpoint again.");
      }
    }
    finish(at, {at.name});
  }

  Place locate(const StoredTensor& tensor, const StoredBox& box)
      const override {
    const FileRange& item = items_.at(box.item);
    Place place{
        .file = item.file,
        .offset = item.begin,
        .strides = std::vector<int64_t>(tensor.sizes.size()),
        .item_begin = item.begin,
        .item_end = item.end};
    int64_t stride = 1;
    for (size_t dim = tensor.sizes.size(); dim-- > 0;) {
      place.strides[dim] = stride;
      stride *= tensor.sizes[dim];
    }
    return place;
  }

  format::Value value(const StoredValue& value) const override {
    throw FileError(
        quoted(path_) + ": " + in_quotes(value.name) +
        " is not a tensor, and safetensors holds tensors only");
  }

  FileRange range_of(size_t item) const override {
    return items_.at(item);
  }

 private:
  format::SafetensorsHeader read_header(size_t file) {
    const auto& entry = files_[file];
    const UniqueFd input = open_file(file);
    auto header = parsing(quoted(entry.path), [&] {
      return format::read_safetensors(
          part_of(input, entry.path, 0, entry.bytes));
    });
    data_offsets_.push_back(header.data_offset);
    notes_.insert(header.metadata.begin(), header.metadata.end());
    return header;
  }

  format::SafetensorsIndex read_index(const std::string& name) const {
    // Not resolve_below(): the user gave this path, so its links may lead
    // anywhere.
    const fs::path path = resolve(root_ / name);
    const auto bytes = read_description(path);
    return parsing(quoted(path), [&] {
      return format::read_safetensors_index(format::as_text(bytes));
    });
  }

  void add_tensor(const format::SafeTensor& tensor, size_t file) {
    StoredTensor stored{
        .name = tensor.name,
        .keys = {tensor.name},
        .dtype = tensor.dtype,
        .sizes = tensor.sizes,
        .boxes = {}};
    if (tensor.end > tensor.begin) {
      stored.boxes.push_back({whole_of(tensor.sizes), items_.size()});
      items_.push_back(
          {.file = file,
           .begin = data_offsets_[file] + tensor.begin,
           .end = data_offsets_[file] + tensor.end});
    }
    tensors_.push_back(std::move(stored));
  }

  void finish(
      const OpenedPath& at,
      const std::vector<std::string>& read_whole) {
    if (at.sums == Sums::Compare) {
      use_checksums(read_whole);
      compare_headers();
    }
    index();
  }

  // Headers are read only here, so they are compared with their checksums here.
  void compare_headers() const {
    if (checksums_) {
      BlockReader reader(*this);
      for (size_t file = 0; file < files_.size(); ++file) {
        reader.check(file, 0, data_offsets_[file]);
      }
    }
  }

  std::vector<FileRange> items_;
  std::vector<uint64_t> data_offsets_; // by file
};

} // namespace

std::unique_ptr<Source> open_safetensors_file(const OpenedPath& at) {
  auto source = std::make_unique<SafetensorsSource>(at);
  source->read_one(at);
  return source;
}

std::unique_ptr<Source> open_safetensors_index(const OpenedPath& at) {
  auto source = std::make_unique<SafetensorsSource>(at);
  source->read_indexed(at);
  return source;
}

} // namespace tessera::checkpoint
