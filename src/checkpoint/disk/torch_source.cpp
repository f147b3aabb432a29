// Files of torch.save; see docs/formats/torch_file.md.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/disk/input.h"
#include "checkpoint/disk/openers.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/disk/tensor_place.h"
#include "checkpoint/format/extent.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_value.h"
#include "checkpoint/format/torch_file.h"

namespace tessera::checkpoint {
namespace {

using format::Dict;
using format::in_quotes;
using format::List;
using format::Value;
using Keys = std::vector<format::DcpPath::Key>;

std::string joined(const Keys& keys) {
  std::string name;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto* text = std::get_if<std::string>(&keys[i]);
    name += i > 0 ? "." : "";
    name += text ? *text : std::to_string(std::get<int64_t>(keys[i]));
  }
  return name;
}

const format::Tensor* as_tensor(const Value& value) {
  const auto* box = value.get<format::Box<format::Tensor>>();
  return box ? &**box : nullptr;
}

// Names the values of a nested dictionary as torch's traverse_state_dict()
// does: dictionaries are always opened, lists only if they hold tensors or
// dictionaries at any depth, and nothing else.
bool is_opened(const Value& value) {
  if (value.get<Dict>()) {
    return true;
  }
  const auto* list = value.get<List>();
  return list &&
      std::any_of(
             list->items.begin(), list->items.end(), [](const Value& item) {
               return as_tensor(item) || is_opened(item);
             });
}

// Python's str() for the types that are used as keys.
std::optional<std::string> key_text(const Value& key) {
  if (const auto* text = key.get<std::string>()) {
    return *text;
  }
  if (const auto* number = key.get<int64_t>()) {
    return std::to_string(*number);
  }
  if (const auto* flag = key.get<bool>()) {
    return *flag ? "True" : "False";
  }
  if (key.get<format::None>()) {
    return "None";
  }
  return std::nullopt;
}

class TorchSource : public Source {
 public:
  explicit TorchSource(const OpenedPath& at) {
    path_ = at.path;
    root_ = at.root;
    add_file(at.name);
    const auto& file = files_[0];
    const UniqueFd input = open_file(0);
    content_ = parsing(quoted(file.path), [&] {
      return format::read_torch_file(part_of(input, file.path, 0, file.bytes));
    });
    const auto* root = content_.value.get<Dict>();
    if (!root) {
      throw UnsupportedError(
          quoted(file.path) + ": holds " + std::string(content_.value.kind()) +
          ", but a checkpoint is a dictionary. Save a state_dict().");
    }
    take_items(*root, {});
    index();
  }

  Format format() const override {
    return Format::TorchFile;
  }

  Place locate(const StoredTensor& tensor, const StoredBox& box)
      const override {
    return parsing(
        quoted(files_[0].path) + ", tensor " + in_quotes(tensor.name), [&] {
          return place_of(
              content_, *items_.at(box.item), tensor.dtype, box.sizes);
        });
  }

  Value value(const StoredValue& value) const override {
    return *items_.at(value.item);
  }

  FileRange range_of(size_t item) const override {
    const auto* tensor = as_tensor(*items_.at(item));
    if (!tensor) {
      return {}; // somewhere in the one pickle
    }
    const auto& storage = content_.storages.at(tensor->storage.key);
    return {
        .file = 0,
        .begin = storage.offset,
        .end = storage.offset + storage.bytes};
  }

 private:
  void take(const Value& value, Keys keys) {
    if (const auto* dict = value.get<Dict>()) {
      take_items(*dict, keys);
    } else if (const auto* tensor = as_tensor(value)) {
      add_tensor(value, *tensor, std::move(keys));
    } else if (is_opened(value)) {
      int64_t position = 0;
      for (const auto& item : value.get<List>()->items) {
        keys.push_back(position++);
        take(item, keys);
        keys.pop_back();
      }
    } else {
      values_.push_back(
          {.name = joined(keys), .keys = keys, .item = items_.size()});
      items_.push_back(&value);
    }
  }

  void take_items(const Dict& dict, Keys keys) {
    if (dict.items.empty()) {
      empty_dicts_.push_back(keys);
    }
    for (const auto& [key, value] : dict.items) {
      const auto text = key_text(key);
      if (!text) {
        throw UnsupportedError(
            quoted(files_[0].path) + ": a key of " + in_quotes(joined(keys)) +
            " is " + std::string(key.kind()) +
            ", but names are made of strings and ints");
      }
      keys.push_back(*text);
      if (key.get<int64_t>()) {
        int_keys_.insert(joined(keys));
      }
      take(value, keys);
      keys.pop_back();
    }
  }

  void add_tensor(const Value& value, const format::Tensor& tensor, Keys keys) {
    const std::string name = joined(keys);
    StoredTensor stored{
        .name = name,
        .keys = std::move(keys),
        .dtype = tensor.dtype,
        .sizes = tensor.sizes,
        .boxes = {}};
    if (*format::checked_numel(tensor.sizes) > 0) {
      stored.boxes.push_back({whole_of(tensor.sizes), items_.size()});
      items_.push_back(&value);
    }
    tensors_.push_back(std::move(stored));
  }

  format::TorchFile content_;
  std::vector<const Value*> items_; // in content_
};

} // namespace

std::unique_ptr<Source> open_torch_file(const OpenedPath& at) {
  return std::make_unique<TorchSource>(at);
}

} // namespace tessera::checkpoint
