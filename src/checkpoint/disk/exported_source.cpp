// Weights in archives of torch.export; docs/formats/exported-program.md.
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/text.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/disk/openers.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/extent.h"
#include "checkpoint/format/format_error.h"
#include "exported/format/archive_reader.h"

namespace tessera::checkpoint {
namespace {

using exported::Expression;
using exported::Payload;
using format::in_quotes;

std::vector<int64_t> written_numbers(
    const std::vector<Expression<int64_t>>& values) {
  std::vector<int64_t> numbers;
  for (const auto& value : values) {
    numbers.push_back(std::get<int64_t>(value.value));
  }
  return numbers;
}

/// Parameters and persistent buffers: what state_dict() has in Python.
class ExportedSource : public Source {
 public:
  explicit ExportedSource(const OpenedPath& at) {
    path_ = at.path;
    root_ = at.root;
    add_file(at.name);
    const auto& file = files_[0];
    const UniqueFd input = open_file(0);
    const auto archive = parsing(quoted(file.path), [&] {
      return exported::read_archive(part_of(input, file.path, 0, file.bytes));
    });
    for (const auto& [name, payload] : archive.weights) {
      add_tensor(name, payload);
    }
    for (const auto& [name, program] : archive.programs) {
      notes_.emplace(
          "program " + name,
          count_text(program.graph.nodes.size(), "node") + ", torch " +
              program.torch_version);
    }
    index();
  }

  Format format() const override {
    return Format::Exported;
  }

  Place locate(const StoredTensor& tensor, const StoredBox& box)
      const override {
    const Payload& payload = items_.at(box.item);
    if (payload.is_missing) {
      throw UnsupportedError(
          quoted(files_[0].path) + ": the archive has no bytes of tensor " +
          in_quotes(tensor.name) +
          "; the model was exported with fake tensors. Its weights come from another checkpoint.");
    }
    const int64_t skipped =
        std::get<int64_t>(payload.meta.storage_offset.value) *
        format::element_bytes(payload.meta.dtype);
    return {
        .file = 0,
        .offset = payload.offset + static_cast<uint64_t>(skipped),
        .strides = written_numbers(payload.meta.strides)};
  }

  format::Value value(const StoredValue& value) const override {
    throw FileError(
        quoted(path_) + ": " + in_quotes(value.name) +
        " is not a tensor, and only tensors are read from exported programs");
  }

  FileRange range_of(size_t item) const override {
    const Payload& payload = items_.at(item);
    return {
        .file = 0,
        .begin = payload.offset,
        .end = payload.offset + payload.size};
  }

 private:
  void add_tensor(const std::string& name, const Payload& payload) {
    StoredTensor stored{
        .name = name,
        .keys = {name},
        .dtype = payload.meta.dtype,
        .sizes = written_numbers(payload.meta.sizes),
        .boxes = {}};
    stored.is_buffer = !payload.is_parameter;
    if (format::checked_numel(stored.sizes).value() > 0) {
      stored.tied_to = first_with_elements_of(payload, name);
      stored.boxes.push_back({whole_of(stored.sizes), items_.size()});
      items_.push_back(payload);
    }
    tensors_.push_back(std::move(stored));
  }

  // The tensor that was added with the same elements, or an empty name.
  std::string first_with_elements_of(
      const Payload& payload,
      const std::string& name) {
    if (payload.is_missing) {
      return "";
    }
    const auto [first, is_new] = known_.emplace(
        Identity{
            payload.offset,
            std::get<int64_t>(payload.meta.storage_offset.value),
            written_numbers(payload.meta.sizes),
            written_numbers(payload.meta.strides),
            payload.meta.dtype},
        name);
    return is_new ? "" : first->second;
  }

  // Which elements of the archive a tensor has.
  using Identity = std::tuple<
      uint64_t,
      int64_t,
      std::vector<int64_t>,
      std::vector<int64_t>,
      format::DType>;

  std::vector<Payload> items_;
  std::map<Identity, std::string> known_; // the first such tensor
};

} // namespace

std::unique_ptr<Source> open_exported(const OpenedPath& at) {
  return std::make_unique<ExportedSource>(at);
}

} // namespace tessera::checkpoint
