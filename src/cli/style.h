// Colours, for people who look at a terminal.
#pragma once

#include <string>

namespace tessera::cli {

/// Marks texts with colours, or leaves them as they are.
class Style {
 public:
  static Style plain() {
    return Style(false);
  }
  /// Colours if standard output is a terminal that understands them and
  /// NO_COLOR is not set; see no-color.org.
  static Style of_standard_output();

  std::string good(const std::string& text) const {
    return in("32", text);
  }
  std::string bad(const std::string& text) const {
    return in("1;31", text);
  }
  std::string heading(const std::string& text) const {
    return in("1", text);
  }
  std::string faint(const std::string& text) const {
    return in("2", text);
  }

 private:
  explicit Style(bool has_colours) : has_colours_(has_colours) {}
  std::string in(const char* code, const std::string& text) const;

  bool has_colours_;
};

} // namespace tessera::cli
