#include "exported/format/json_at.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "checkpoint/format/format_error.h"

namespace tessera::exported {

using format::FormatError;
using format::in_quotes;
using format::UnsupportedFormat;

bool JsonAt::boolean() const {
  if (!value_.is_boolean()) {
    fail_kind("true or false");
  }
  return value_.get<bool>();
}

int64_t JsonAt::integer() const {
  if (!value_.is_number_integer()) {
    fail_kind("an integer");
  }
  if (value_.is_number_unsigned() &&
      value_.get<uint64_t>() > uint64_t{INT64_MAX}) {
    fail("the integer does not fit into 64 bits");
  }
  return value_.get<int64_t>();
}

double JsonAt::number() const {
  if (value_.is_number()) {
    return value_.get<double>();
  }
  if (value_.is_string()) {
    const auto& text = string();
    if (text == "Infinity") {
      return std::numeric_limits<double>::infinity();
    }
    if (text == "-Infinity") {
      return -std::numeric_limits<double>::infinity();
    }
    if (text == "NaN") {
      return std::numeric_limits<double>::quiet_NaN();
    }
  }
  fail_kind("a number");
}

const std::string& JsonAt::string() const {
  if (!value_.is_string()) {
    fail_kind("a string");
  }
  return value_.get_ref<const std::string&>();
}

size_t JsonAt::size() const {
  if (!value_.is_array() && !value_.is_object()) {
    fail_kind("an array or an object");
  }
  return value_.size();
}

JsonAt JsonAt::at(size_t index) const& {
  expect_array();
  if (index >= value_.size()) {
    fail(
        "has " + std::to_string(value_.size()) + " items, at least " +
        std::to_string(index + 1) + " are needed");
  }
  return JsonAt(value_[index], *this, index);
}

void JsonAt::expect_only(std::initializer_list<std::string_view> names) const {
  for_each_field([&](const std::string& name, const JsonAt&) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      refuse("has the field " + in_quotes(name) + ", which is not known");
    }
  });
}

bool JsonAt::has(std::string_view name) const {
  expect_object();
  const auto field = value_.find(name);
  return field != value_.end() && !field->is_null();
}

JsonAt JsonAt::at(std::string_view name) const& {
  expect_object();
  const auto field = value_.find(name);
  if (field == value_.end()) {
    fail("has no field " + in_quotes(name));
  }
  return JsonAt(*field, *this, field.key());
}

const std::string& JsonAt::tag() const {
  expect_object();
  if (value_.size() != 1) {
    fail(
        "has " + std::to_string(value_.size()) +
        " fields; one is wanted, whose name says what the value is");
  }
  return value_.begin().key();
}

JsonAt JsonAt::tagged() const& {
  const auto& name = tag();
  return JsonAt(value_.begin().value(), *this, name);
}

void JsonAt::refuse_tag() const {
  refuse("is " + in_quotes(tag()) + ", which is not known here");
}

void JsonAt::fail(const std::string& text) const {
  throw FormatError(place() + " " + text);
}

void JsonAt::refuse(const std::string& text) const {
  throw UnsupportedFormat(place() + " " + text);
}

std::string JsonAt::place() const {
  std::vector<const JsonAt*> steps;
  const JsonAt* root = this;
  for (; root->parent_; root = root->parent_) {
    steps.push_back(root);
  }
  std::string text(root->name_);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if ((*step)->is_item_) {
      text += "[" + std::to_string((*step)->index_) + "]";
    } else {
      text += step == steps.rbegin() ? ": " : ".";
      // A name that could be anything is quoted, and cut if it is long.
      const auto name = (*step)->name_;
      const bool is_plain = !name.empty() && name.size() <= 80 &&
          std::all_of(name.begin(), name.end(), [](unsigned char c) {
            return std::isalnum(c) || c == '_';
          });
      text += is_plain ? std::string(name) : in_quotes(name);
    }
  }
  return text;
}

void JsonAt::expect_array() const {
  if (!value_.is_array()) {
    fail_kind("an array");
  }
}

void JsonAt::expect_object() const {
  if (!value_.is_object()) {
    fail_kind("an object");
  }
}

void JsonAt::fail_kind(std::string_view wanted) const {
  std::string kind = value_.type_name();
  fail("is " + kind + ", not " + std::string(wanted));
}

} // namespace tessera::exported
