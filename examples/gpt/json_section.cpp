#include "json_section.h"

#include <stdexcept>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gpt {

using nlohmann::json;

namespace {

constexpr size_t kLongest = 120;

} // namespace

std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kLongest) {
    size_t end = kLongest;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0U) == 0x80) {
      --end; // not in the middle of a character
    }
    text = text.substr(0, end) + "...";
  }
  return text;
}

json parse_strictly(std::string_view text, int max_depth) {
  std::vector<std::unordered_set<std::string>> names;
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    using Event = json::parse_event_t;
    if (depth > max_depth) {
      throw std::runtime_error(
          "it is nested deeper than " + std::to_string(max_depth) + " levels");
    }
    if (event == Event::object_start) {
      names.emplace_back();
    } else if (event == Event::object_end) {
      names.pop_back();
    } else if (
        event == Event::key &&
        !names.back().insert(value.get_ref<const std::string&>()).second) {
      throw std::runtime_error("it has the name " + shown(value) + " twice");
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& error) {
    throw std::runtime_error(std::string("it is not JSON: ") + error.what());
  }
}

void fail(const std::string& what) {
  throw std::runtime_error(what);
}

std::string element(const std::string& place, size_t index) {
  return place + "[" + std::to_string(index) + "]";
}

int32_t read_id(const json& value, const std::string& place) {
  if (!value.is_number_integer() || value < 0 || value >= kMaxVocabulary) {
    fail(
        place + " is " + shown(value) + ", not a whole number from 0 to " +
        std::to_string(kMaxVocabulary - 1));
  }
  return value.get<int32_t>();
}

JsonSection::JsonSection(const json& value, std::string place)
    : value_(value), place_(std::move(place)) {
  if (!value.is_object()) {
    throw std::runtime_error(
        (place_.empty() ? "the file" : place_) + " is " + shown(value) +
        ", not an object");
  }
}

std::string JsonSection::place_of(const std::string& name) const {
  return place_.empty() ? name : place_ + "." + name;
}

const json* JsonSection::find(const std::string& name) {
  asked_.insert(name);
  const auto found = value_.find(name);
  return found == value_.end() || found->is_null() ? nullptr : &*found;
}

const json& JsonSection::at(const std::string& name) {
  const auto* found = find(name);
  if (found == nullptr) {
    throw std::runtime_error(place_of(name) + " is missing");
  }
  return *found;
}

const std::string& JsonSection::text(const std::string& name) {
  const auto& found = at(name);
  if (!found.is_string()) {
    refuse(name, "not text");
  }
  return found.get_ref<const std::string&>();
}

const json& JsonSection::array(const std::string& name) {
  const auto& found = at(name);
  if (!found.is_array()) {
    refuse(name, "not a list");
  }
  return found;
}

bool JsonSection::flag(const std::string& name, bool otherwise) {
  const auto* found = find(name);
  if (found == nullptr) {
    return otherwise;
  }
  if (!found->is_boolean()) {
    refuse(name, "neither true nor false");
  }
  return found->get<bool>();
}

void JsonSection::ignore(const std::string& name) {
  asked_.insert(name);
}

void JsonSection::refuse(const std::string& name, const std::string& why)
    const {
  throw std::runtime_error(
      place_of(name) + " is " + shown(value_.value(name, json())) + ", " + why);
}

void JsonSection::end() const {
  for (const auto& [name, value] : value_.items()) {
    if (!asked_.contains(name)) {
      refuse(name, "and a field of that name is not supported");
    }
  }
}

} // namespace gpt
