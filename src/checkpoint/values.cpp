#include "checkpoint/values.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <utility>

#include "checkpoint/scalar_type.h"

namespace tessera::checkpoint {

namespace {

using format::DType;

StateKey key_from(const format::Value& key, const std::string& name) {
  if (const auto* text = key.get<std::string>()) {
    return StateKey(*text);
  }
  if (const auto* number = key.get<int64_t>()) {
    return StateKey(*number);
  }
  raise<c10::ValueError>(
      {.call = "load", .parameter = name},
      fmt::format("a dictionary has {} as a key.", key.kind()));
}

StateList list_from(
    const std::vector<format::Value>& items,
    const std::string& name) {
  StateList list;
  list.reserve(items.size());
  for (const format::Value& item : items) {
    list.push_back(from_format(item, name));
  }
  return list;
}

} // namespace

std::optional<DType> to_format(at::ScalarType dtype) {
  for (int i = 0; i < format::kNumDTypes; ++i) {
    if (scalar_type(static_cast<DType>(i)) == dtype) {
      return static_cast<DType>(i);
    }
  }
  return std::nullopt;
}

at::ScalarType from_format(DType dtype) {
  return scalar_type(dtype);
}

format::Value to_format(const StateValue& value) {
  if (value.is_bool()) {
    return value.to_bool();
  }
  if (value.is_int()) {
    return value.to_int();
  }
  if (value.is_double()) {
    return value.to_double();
  }
  if (value.is_string()) {
    return value.string();
  }
  if (value.is_list()) {
    format::List list;
    for (const StateValue& item : value.list()) {
      list.items.push_back(to_format(item));
    }
    return list;
  }
  if (value.is_dict()) {
    format::Dict dict;
    for (const auto& [key, item] : value.dict()) {
      dict.add(
          key.is_id() ? format::Value(key.id()) : format::Value(key.name()),
          to_format(item));
    }
    return dict;
  }
  TESSERA_INTERNAL_ASSERT(value.is_none(), "a tensor is not a plain value");
  return format::None();
}

StateValue from_format(const format::Value& value, const std::string& name) {
  if (value.get<format::None>() != nullptr) {
    return {};
  }
  if (const auto* boolean = value.get<bool>()) {
    return *boolean;
  }
  if (const auto* integer = value.get<int64_t>()) {
    return *integer;
  }
  if (const auto* number = value.get<double>()) {
    return *number;
  }
  if (const auto* text = value.get<std::string>()) {
    return *text;
  }
  if (const auto* list = value.get<format::List>()) {
    return list_from(list->items, name);
  }
  if (const auto* tuple = value.get<format::Tuple>()) {
    return list_from(tuple->items, name);
  }
  if (const auto* size = value.get<format::Size>()) {
    return StateList(size->dims.begin(), size->dims.end());
  }
  if (const auto* dict = value.get<format::Dict>()) {
    StateDict result;
    for (const format::DictItem& item : dict->items) {
      result.set(key_from(item.key, name), from_format(item.value, name));
    }
    return result;
  }
  raise<c10::ValueError>(
      {.call = "load", .parameter = name},
      fmt::format(
          "the checkpoint has {} here, which a state dict cannot hold. Leave it out with LoadOptions().filter().",
          value.kind()));
}

} // namespace tessera::checkpoint
