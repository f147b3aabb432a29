// What calls throw, as text.
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace tessera::testing {

/// The text of what `body` throws; "nothing was thrown" if it does not throw.
inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

} // namespace tessera::testing
