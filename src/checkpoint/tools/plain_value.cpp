#include "checkpoint/tools/plain_value.h"

#include <string>
#include <vector>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/format/format_error.h"

namespace tessera::checkpoint {
namespace {

bool holds_tensors(const format::Value& value);

bool any_holds_tensors(const std::vector<format::Value>& values) {
  for (const auto& value : values) {
    if (holds_tensors(value)) {
      return true;
    }
  }
  return false;
}

bool holds_tensors(const format::Value& value) {
  if (value.get<format::Box<format::Tensor>>() ||
      value.get<format::Box<format::Storage>>()) {
    return true;
  }
  if (const auto* list = value.get<format::List>()) {
    return any_holds_tensors(list->items);
  }
  if (const auto* tuple = value.get<format::Tuple>()) {
    return any_holds_tensors(tuple->items);
  }
  if (const auto* set = value.get<format::Set>()) {
    return any_holds_tensors(set->items);
  }
  if (const auto* dict = value.get<format::Dict>()) {
    for (const auto& [key, item] : dict->items) {
      if (holds_tensors(key) || holds_tensors(item)) {
        return true;
      }
    }
  }
  return false;
}

} // namespace

format::Value plain_value(const Content& content, const ValueEntry& entry) {
  format::Value value = content.source->value(*entry.value);
  if (holds_tensors(value)) {
    throw FileError(
        quoted(content.source->path()) + ": " + format::in_quotes(entry.name) +
        " is " + std::string(value.kind()) +
        " with tensors in it, which is not supported. Keep tensors in dictionaries and lists, or leave it out with --select.");
  }
  return value;
}

} // namespace tessera::checkpoint
