#include "checkpoint/format/pickle_value.h"

#include <algorithm>
#include <array>

namespace tessera::format {

bool List::operator==(const List& other) const {
  return items == other.items;
}

bool Tuple::operator==(const Tuple& other) const {
  return items == other.items;
}

bool Set::operator==(const Set& other) const {
  return items == other.items;
}

bool Dict::operator==(const Dict& other) const {
  return items == other.items;
}

const Value* Dict::find(std::string_view name) const {
  const auto found =
      std::find_if(items.rbegin(), items.rend(), [&](const DictItem& item) {
        const auto* text = item.key.get<std::string>();
        return text && *text == name;
      });
  return found == items.rend() ? nullptr : &found->value;
}

void Dict::add(Value key, Value value) {
  items.push_back({std::move(key), std::move(value)});
}

Value::Value(const char* text) : is(std::string(text)) {}

Value::Value(int value) : is(int64_t{value}) {}

Value::Value(Storage value) : is(Box<Storage>(std::move(value))) {}

Value::Value(Tensor value) : is(Box<Tensor>(std::move(value))) {}

Value::Value(Object value) : is(Box<Object>(std::move(value))) {}

bool Value::operator==(const Value& other) const {
  return is == other.is;
}

std::string_view Value::kind() const {
  // In the order of the variant.
  constexpr std::array<std::string_view, std::variant_size_v<Variant>> kNames =
      {"None",          "a bool",         "an int",           "a float",
       "a string",      "bytes",          "a complex number", "a list",
       "a tuple",       "a set",          "a dict",           "a torch.Size",
       "a torch.dtype", "a torch.device", "a torch.layout",   "a memory format",
       "a path",        "a storage",      "a tensor",         "an object"};
  return kNames[is.index()];
}

} // namespace tessera::format
