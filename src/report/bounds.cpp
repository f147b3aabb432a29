#include "report/bounds.h"

#include <limits>

namespace tessera::report {

std::optional<double> named_number(std::string_view text) {
  if (text == "nan") {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (text == "inf") {
    return std::numeric_limits<double>::infinity();
  }
  if (text == "-inf") {
    return -std::numeric_limits<double>::infinity();
  }
  return std::nullopt;
}

} // namespace tessera::report
