#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace tessera::exported {

/// A JSON value and the place where it stands, for messages: "model.json:
/// graph.nodes[3].inputs[0].name". A place points at the one it was reached
/// from, so that places cost nothing until one of them is needed. That one
/// must outlive it, which the compiler sees to. All functions throw FormatError
/// for values of another kind than the one that is asked for.
class JsonAt {
 public:
  /// `entry` names the whole: a file of the archive. Both must outlive it.
  JsonAt(const nlohmann::json& value, std::string_view entry)
      : value_(value), name_(entry) {}
  JsonAt(const JsonAt&) = delete;
  JsonAt& operator=(const JsonAt&) = delete;

  bool is_null() const {
    return value_.is_null();
  }
  bool is_string() const {
    return value_.is_string();
  }
  bool is_array() const {
    return value_.is_array();
  }
  bool is_object() const {
    return value_.is_object();
  }
  bool boolean() const;
  int64_t integer() const;
  /// Also "Infinity", "-Infinity" and "NaN", which JSON has no numbers for.
  double number() const;
  const std::string& string() const;

  /// How many items an array has, or members an object.
  size_t size() const;
  /// The item of an array.
  JsonAt at(size_t index) const&;
  JsonAt at(size_t index) const&& = delete;

  /// Throws UnsupportedFormat unless the value is an object that has no fields
  /// but these.
  void expect_only(std::initializer_list<std::string_view> names) const;
  /// Whether the object has the field and it is not null.
  bool has(std::string_view name) const;
  /// The field, which must be there.
  JsonAt at(std::string_view name) const&;
  JsonAt at(std::string_view name) const&& = delete;

  /// For an object that has one field, whose name says what the value is: the
  /// name, and the value. What the name may be is for the caller to say, with
  /// refuse_tag().
  const std::string& tag() const;
  JsonAt tagged() const&;
  JsonAt tagged() const&& = delete;
  [[noreturn]] void refuse_tag() const;

  template <class Each>
  void for_each_item(const Each& each) const {
    expect_array();
    for (size_t i = 0; i < value_.size(); ++i) {
      each(at(i));
    }
  }
  /// Calls each(name, value).
  template <class Each>
  void for_each_field(const Each& each) const {
    expect_object();
    for (auto field = value_.begin(); field != value_.end(); ++field) {
      each(field.key(), JsonAt(field.value(), *this, field.key()));
    }
  }

  /// Throws FormatError: bytes that break the format.
  [[noreturn]] void fail(const std::string& text) const;
  /// Throws UnsupportedFormat: bytes that seem fine, but are not read.
  [[noreturn]] void refuse(const std::string& text) const;
  /// "model.json: graph.nodes[3]"
  std::string place() const;

 private:
  JsonAt(
      const nlohmann::json& value,
      const JsonAt& parent,
      std::string_view name)
      : value_(value), parent_(&parent), name_(name) {}
  JsonAt(const nlohmann::json& value, const JsonAt& parent, size_t index)
      : value_(value), parent_(&parent), index_(index), is_item_(true) {}

  void expect_array() const;
  void expect_object() const;
  [[noreturn]] void fail_kind(std::string_view wanted) const;

  const nlohmann::json& value_;
  const JsonAt* parent_ = nullptr;
  std::string_view name_; // in the parent, or of the entry
  size_t index_ = 0;
  bool is_item_ = false;
};

} // namespace tessera::exported
