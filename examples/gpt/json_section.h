#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

namespace gpt {

/// Reads JSON text. Throws std::runtime_error if it is not JSON, not UTF-8, is
/// nested deeper than `max_depth`, or has a name twice in an object.
nlohmann::json parse_strictly(std::string_view text, int max_depth);

/// The value as text for messages, cut where it is long.
std::string shown(const nlohmann::json& value);

/// Throws std::runtime_error.
[[noreturn]] void fail(const std::string& what);

/// "place[index]".
std::string element(const std::string& place, size_t index);

/// The number of a token. More than kMaxVocabulary, which bounds the memory, no
/// known tokenizer has.
constexpr int64_t kMaxVocabulary = int64_t{1} << 20;
int32_t read_id(const nlohmann::json& value, const std::string& place);

/// An object of a file whose every field counts: end() refuses the fields that
/// nobody asked for. All functions throw std::runtime_error, with the place in
/// the file and the value.
class JsonSection {
 public:
  /// `value` has to outlive it. `place` is as in "model"; empty for the file.
  JsonSection(const nlohmann::json& value, std::string place);

  std::string place_of(const std::string& name) const;
  /// nullptr for a field that is missing or null.
  const nlohmann::json* find(const std::string& name);
  const nlohmann::json& at(const std::string& name);
  const std::string& text(const std::string& name);
  const nlohmann::json& array(const std::string& name);
  bool flag(const std::string& name, bool otherwise);
  /// Asks for a field and ignores it: it does not matter here.
  void ignore(const std::string& name);
  /// Refuses the value of a field; `why` ends the sentence.
  [[noreturn]] void refuse(const std::string& name, const std::string& why)
      const;
  void end() const;

 private:
  const nlohmann::json& value_;
  const std::string place_;
  std::set<std::string> asked_;
};

} // namespace gpt
