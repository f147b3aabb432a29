// Typed access to the fields of values that came from a pickle.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/pickle_value.h"

namespace tessera::format {

/// The value as a T. Throws FormatError, for example "`what` is a string, not a
/// dict".
template <class T>
const T& expect(const Value& value, const std::string& what);

std::vector<std::string> expect_strings(
    const Value& value,
    const std::string& what);
/// Accepts None, a missing field, a string, or a path.
std::optional<std::string> expect_optional_string(
    const Value* value,
    const std::string& what);

/// An object's fields by name. `value` must outlive it.
class Fields {
 public:
  /// Throws unless the value is of the class and has only the fields `names`.
  /// `where` is for messages: `tensor "w"`.
  Fields(
      const Value& value,
      Class cls,
      std::string where,
      std::initializer_list<std::string_view> names);

  /// Null if the field does not exist.
  const Value* find(std::string_view name) const {
    return fields_.find(name);
  }
  const Value& at(std::string_view name) const;
  template <class T>
  const T& get(std::string_view name) const {
    return expect<T>(at(name), what(name));
  }

  /// `tensor "w": Metadata.version`
  std::string what(std::string_view name) const;

 private:
  const Dict& fields_;
  std::string where_;
};

} // namespace tessera::format
