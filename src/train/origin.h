// Where and when something was logged.
#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <string>

namespace tessera::train {

/// Seconds since 1970.
inline double time_now() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

/// Empty if the host has none.
inline std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

} // namespace tessera::train
