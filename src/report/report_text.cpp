#include "report/report_text.h"

#include <array>
#include <cmath>
#include <cstdio>

#include "base/terminal_escapes.h"

namespace tessera::report {
namespace {

template <class... Values>
std::string print(const char* format, Values... values) {
  std::array<char, 64> buffer{};
  std::snprintf(buffer.data(), buffer.size(), format, values...);
  return buffer.data();
}

} // namespace

std::string clipped(std::string text, size_t max_bytes) {
  if (text.size() <= max_bytes) {
    return text;
  }
  size_t end = max_bytes;
  // Bytes 10xxxxxx continue a character that began before.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) {
    --end;
  }
  text.resize(end);
  return text + "...";
}

std::string printable(std::string text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (const size_t length = control_length(text, i)) {
      text.replace(i, length, "?");
    }
  }
  return text;
}

std::string number_text(double value) {
  if (std::isnan(value)) {
    return "nan"; // printf may add a sign
  }
  const double size = std::fabs(value);
  return size >= 0.01 && size < 10000 ? print("%.4f", value)
                                      : print("%.4g", value);
}

std::string duration_text(double seconds) {
  if (seconds < 59.95) {
    return seconds < 10 ? print("%.2f s", seconds) : print("%.1f s", seconds);
  }
  const double whole = std::floor(seconds + 0.5);
  const double hours = std::floor(whole / 3600);
  const double minutes = std::floor((whole - hours * 3600) / 60);
  if (hours >= 1) {
    return count_text(hours) + print(" h %02.0f min", minutes);
  }
  return print("%.0f min %02.0f s", minutes, whole - minutes * 60);
}

} // namespace tessera::report
