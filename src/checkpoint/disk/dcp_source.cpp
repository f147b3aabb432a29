// DCP folders; see docs/formats/dcp.md.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/block_reader.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/disk/openers.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/disk/tensor_place.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/extent.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/torch_file.h"

namespace tessera::checkpoint {
namespace {

using format::in_quotes;

class DcpSource : public Source {
 public:
  explicit DcpSource(const OpenedPath& at) {
    path_ = at.path;
    root_ = at.root;
    if (at.sums == Sums::Compare) {
      use_checksums({kDcpMetadataName}); // before the length is trusted
    }
    const auto metadata = read_metadata();
    take_paths(metadata);
    for (const auto& tensor : metadata.tensors) {
      add_tensor(tensor);
    }
    for (const auto& value : metadata.bytes) {
      values_.push_back(
          {.name = value.name,
           .keys = keys_of(value.name),
           .item = add_item(value.storage, value.name)});
    }
    if (at.sums == Sums::Compare) {
      use_checksums({});
    }
    index();
  }

  Format format() const override {
    return Format::Dcp;
  }

  Place locate(const StoredTensor& tensor, const StoredBox& box)
      const override {
    const Item& item = items_.at(box.item);
    refuse_transforms(item, tensor.name);
    const auto& path = files_[item.file].path;
    const UniqueFd file = open_file(item.file);
    return parsing(where(item, tensor.name), [&] {
      const auto stored = format::read_torch_file(
          part_of(file, path, item.offset, item.length));
      Place place = place_of(stored, stored.value, tensor.dtype, box.sizes);
      place.file = item.file;
      place.offset += item.offset;
      place.item_begin = item.offset;
      place.item_end = item.offset + item.length;
      return place;
    });
  }

  format::Value value(const StoredValue& value) const override {
    const Item& item = items_.at(value.item);
    refuse_transforms(item, value.name);
    std::vector<uint8_t> bytes(item.length); // inside of the file
    BlockReader(*this).read(item.file, item.offset, bytes.data(), bytes.size());
    return parsing(where(item, value.name), [&] {
      return format::read_torch_file(format::ByteSpan(bytes)).value;
    });
  }

  FileRange range_of(size_t item) const override {
    const Item& at = items_.at(item);
    return {.file = at.file, .begin = at.offset, .end = at.offset + at.length};
  }

 private:
  struct Item {
    size_t file = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
    std::string transform; // empty: none
  };

  format::DcpMetadata read_metadata() const {
    const fs::path path = resolve_below(root_, kDcpMetadataName);
    const auto bytes = read_description(path);
    return parsing(
        quoted(path), [&] { return format::read_dcp_metadata(bytes); });
  }

  void take_paths(const format::DcpMetadata& metadata) {
    if (metadata.paths) {
      for (const auto& path : *metadata.paths) {
        paths_.emplace(path.name, path.keys);
      }
    }
  }

  std::vector<format::DcpPath::Key> keys_of(const std::string& name) const {
    const auto found = paths_.find(name);
    return found == paths_.end() ? std::vector<format::DcpPath::Key>{name}
                                 : found->second;
  }

  void add_tensor(const format::DcpTensor& tensor) {
    StoredTensor stored{
        .name = tensor.name,
        .keys = keys_of(tensor.name),
        .dtype = tensor.dtype,
        .sizes = tensor.sizes,
        .boxes = {}};
    for (const auto& chunk : tensor.chunks) {
      // The metadata's reader made sure that the product of the sizes does not
      // overflow.
      if (*format::checked_numel(chunk.sizes) > 0) {
        stored.boxes.push_back(
            {{.offsets = chunk.offsets, .sizes = chunk.sizes},
             add_item(*chunk.storage, tensor.name)});
      }
    }
    tensors_.push_back(std::move(stored));
  }

  size_t add_item(const format::DcpStorage& storage, const std::string& name) {
    const auto found = file_numbers_.find(storage.file);
    const size_t file =
        found == file_numbers_.end() ? add_file(storage.file) : found->second;
    file_numbers_.emplace(storage.file, file);
    Item item{
        .file = file,
        .offset = static_cast<uint64_t>(storage.offset),
        .length = static_cast<uint64_t>(storage.length),
        .transform =
            storage.transforms.empty() ? "" : storage.transforms.front()};
    if (!format::fits(item.offset, item.length, files_[file].bytes)) {
      throw FileError(
          where(item, name) + ": " + std::to_string(item.length) +
          " bytes are promised, the file ends at " +
          std::to_string(files_[file].bytes) +
          ". The file was cut off; use another checkpoint.");
    }
    items_.push_back(std::move(item));
    return items_.size() - 1;
  }

  std::string where(const Item& item, const std::string& name) const {
    return quoted(files_[item.file].path) + ", item of " + in_quotes(name) +
        " at byte " + std::to_string(item.offset);
  }

  void refuse_transforms(const Item& item, const std::string& name) const {
    if (!item.transform.empty()) {
      throw UnsupportedError(
          where(item, name) + ": stored through the extension " +
          in_quotes(item.transform) +
          ", which is not supported. Save it again with torch.distributed.checkpoint and no extensions.");
    }
  }

  std::map<std::string, std::vector<format::DcpPath::Key>> paths_;
  std::map<std::string, size_t> file_numbers_;
  std::vector<Item> items_;
};

} // namespace

std::unique_ptr<Source> open_dcp(const OpenedPath& at) {
  return std::make_unique<DcpSource>(at);
}

} // namespace tessera::checkpoint
