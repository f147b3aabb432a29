#include "checkpoint/format/object_fields.h"

#include <algorithm>
#include <utility>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_globals.h"

namespace tessera::format {
namespace {

[[noreturn]] void refuse_kind(const Value& value, const std::string& what) {
  throw FormatError(what + " is " + std::string(value.kind()));
}

const Object& expect_object(
    const Value& value,
    Class cls,
    const std::string& where) {
  const auto& object = *expect<Box<Object>>(value, where);
  if (object.cls != cls) {
    throw FormatError(
        where + " is a " + std::string(name_of(object.cls).name) + ", not a " +
        std::string(name_of(cls).name));
  }
  return object;
}

} // namespace

template <class T>
const T& expect(const Value& value, const std::string& what) {
  const T* found = value.get<T>();
  if (!found) {
    refuse_kind(value, what);
  }
  return *found;
}

template const bool& expect(const Value&, const std::string&);
template const int64_t& expect(const Value&, const std::string&);
template const std::string& expect(const Value&, const std::string&);
template const List& expect(const Value&, const std::string&);
template const Tuple& expect(const Value&, const std::string&);
template const Dict& expect(const Value&, const std::string&);
template const Size& expect(const Value&, const std::string&);
template const DType& expect(const Value&, const std::string&);
template const Layout& expect(const Value&, const std::string&);
template const MemoryFormat& expect(const Value&, const std::string&);
template const Box<Object>& expect(const Value&, const std::string&);

std::vector<std::string> expect_strings(
    const Value& value,
    const std::string& what) {
  std::vector<std::string> strings;
  for (const auto& item : expect<List>(value, what).items) {
    strings.push_back(expect<std::string>(item, what));
  }
  return strings;
}

std::optional<std::string> expect_optional_string(
    const Value* value,
    const std::string& what) {
  if (!value || value->get<None>()) {
    return std::nullopt;
  }
  if (const auto* path = value->get<Path>()) {
    return path->name;
  }
  return expect<std::string>(*value, what);
}

Fields::Fields(
    const Value& value,
    Class cls,
    std::string where,
    std::initializer_list<std::string_view> names)
    : fields_(expect<Dict>(expect_object(value, cls, where).state, where)),
      where_(std::move(where)) {
  for (const auto& item : fields_.items) {
    const auto& name =
        expect<std::string>(item.key, where_ + ": a field's name");
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      throw FormatError(
          where_ + " has the field " + in_quotes(name) +
          ", which is not supported");
    }
  }
}

const Value& Fields::at(std::string_view name) const {
  const Value* value = find(name);
  if (!value) {
    throw FormatError(where_ + " has no field " + in_quotes(name));
  }
  return *value;
}

std::string Fields::what(std::string_view name) const {
  return where_ + ": " + std::string(name);
}

} // namespace tessera::format
