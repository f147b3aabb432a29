// What carries the data of a world's groups, as the user asked for it.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace tessera::comm {

enum class BackendChoice { Auto, Shm, Gloo, Nccl, Fake };

/// By value of BackendChoice.
inline constexpr std::array<std::string_view, 5> kBackendNames{
    "auto",
    "shm",
    "gloo",
    "nccl",
    "fake"};

inline std::string_view name_of(BackendChoice backend) {
  return kBackendNames[static_cast<size_t>(backend)];
}

inline std::optional<BackendChoice> find_backend(std::string_view name) {
  for (size_t i = 0; i < kBackendNames.size(); ++i) {
    if (kBackendNames[i] == name) {
      return static_cast<BackendChoice>(i);
    }
  }
  return std::nullopt;
}

} // namespace tessera::comm
