#include "checkpoint/tools/content.h"

#include <algorithm>
#include <set>
#include <utility>

#include "checkpoint/disk/input.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/tools/checkpoint_text.h"
#include "checkpoint/tools/name_filter.h"

namespace tessera::checkpoint {
namespace {

using format::in_quotes;

bool is_floating(format::DType dtype) {
  switch (dtype) {
    case format::DType::BFloat16:
    case format::DType::Float16:
    case format::DType::Float32:
    case format::DType::Float64:
      return true;
    default:
      return false;
  }
}

// Removes `prefix` and the dot after it from the keys, if need be in the middle
// of a key. False if the name does not continue after the prefix.
bool strip(const std::string& prefix, EntryPath* path) {
  std::string left = prefix + ".";
  while (!left.empty() && !path->keys.empty()) {
    auto& front = path->keys.front();
    const std::string text = key_text(front.key);
    if (left.starts_with(text + ".")) {
      left.erase(0, text.size() + 1);
      path->keys.erase(path->keys.begin());
    } else if (text.starts_with(left)) {
      front = {.key = text.substr(left.size())};
      left.clear();
    } else {
      return false;
    }
  }
  return left.empty() && !path->keys.empty();
}

void put_in_front(const std::string& prefix, EntryPath* path) {
  std::vector<EntryPath::Key> keys;
  for (size_t begin = 0; begin <= prefix.size();) {
    const size_t end = std::min(prefix.find('.', begin), prefix.size());
    keys.push_back({.key = prefix.substr(begin, end - begin)});
    begin = end + 1;
  }
  path->keys.insert(path->keys.begin(), keys.begin(), keys.end());
}

class Chooser {
 public:
  Chooser(const Source& source, const ContentOptions& options)
      : source_(source), options_(options) {}

  Content run() {
    Content content{
        .source = &source_, .tensors = {}, .values = {}, .empty_dicts = {}};
    for (const auto& tensor : source_.tensors()) {
      if (is_selected(tensor.name)) {
        auto path = renamed(tensor.keys, tensor.name);
        auto name = unique_name(path);
        content.tensors.push_back(
            {.name = std::move(name),
             .path = std::move(path),
             .tensor = &tensor,
             .dtype = dtype_for(tensor)});
      }
    }
    for (const auto& value : source_.values()) {
      if (is_selected(value.name)) {
        auto path = renamed(value.keys, value.name);
        auto name = unique_name(path);
        content.values.push_back(
            {.name = std::move(name),
             .path = std::move(path),
             .value = &value});
      }
    }
    if (content.tensors.empty() && content.values.empty()) {
      throw FileError(
          quoted(source_.path()) + ": nothing is left to write. " +
          (options_.select.empty() && options_.exclude.empty()
               ? "The checkpoint is empty."
               : "--select and --exclude leave no name; `tessera ckpt inspect` lists them."));
    }
    for (const auto& keys : source_.empty_dicts()) {
      const std::string name = with_ints(keys).name();
      if (is_selected(name) && name != options_.strip_prefix) {
        content.empty_dicts.push_back(renamed(keys, name));
      }
    }
    return content;
  }

 private:
  bool is_selected(const std::string& name) const {
    return (options_.select.empty() ||
            begins_with_any(name, options_.select)) &&
        !begins_with_any(name, options_.exclude);
  }

  EntryPath with_ints(const std::vector<format::DcpPath::Key>& keys) const {
    EntryPath path;
    for (const auto& key : keys) {
      path.keys.push_back({.key = key});
      path.keys.back().was_int = source_.int_keys().contains(path.name());
    }
    return path;
  }

  EntryPath renamed(
      const std::vector<format::DcpPath::Key>& keys,
      const std::string& name) const {
    EntryPath path = with_ints(keys);
    if (!options_.strip_prefix.empty() &&
        !strip(options_.strip_prefix, &path)) {
      throw FileError(
          in_quotes(name) + " does not begin with " +
          in_quotes(options_.strip_prefix + ".") +
          ". Choose the names that do with --select " + options_.strip_prefix +
          ".");
    }
    if (!options_.add_prefix.empty()) {
      put_in_front(options_.add_prefix, &path);
    }
    return path;
  }

  std::string unique_name(const EntryPath& path) {
    std::string name = path.name();
    if (!names_.insert(name).second) {
      throw FileError("two entries would be named " + in_quotes(name));
    }
    return name;
  }

  format::DType dtype_for(const StoredTensor& tensor) const {
    return options_.dtype && is_floating(tensor.dtype) && !tensor.sizes.empty()
        ? *options_.dtype
        : tensor.dtype;
  }

  const Source& source_;
  const ContentOptions& options_;
  std::set<std::string> names_;
};

} // namespace

std::string EntryPath::name() const {
  std::string name;
  for (size_t i = 0; i < keys.size(); ++i) {
    name += (i > 0 ? "." : "") + key_text(keys[i].key);
  }
  return name;
}

std::vector<format::DcpPath::Key> EntryPath::plain() const {
  std::vector<format::DcpPath::Key> plain;
  for (const auto& key : keys) {
    plain.push_back(key.key);
  }
  return plain;
}

uint64_t TensorEntry::bytes() const {
  return static_cast<uint64_t>(tensor->numel() * format::element_bytes(dtype));
}

uint64_t Content::bytes() const {
  uint64_t sum = 0;
  for (const auto& tensor : tensors) {
    sum += tensor.bytes();
  }
  return sum;
}

Content choose(const Source& source, const ContentOptions& options) {
  return Chooser(source, options).run();
}

} // namespace tessera::checkpoint
