#pragma once

#include <stdexcept>

namespace tessera::report {

/// A log that cannot be read, or a page that cannot be written. The text names
/// the file and says what to do.
class ReportError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

} // namespace tessera::report
