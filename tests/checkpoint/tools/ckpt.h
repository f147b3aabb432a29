// `tessera ckpt` as users run it.
#pragma once

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include "checkpoint/disk/scratch_folder.h"
#include "support/command.h"

namespace tessera::checkpoint {

using tessera::testing::CommandResult;

inline CommandResult ckpt(const std::vector<std::string>& words) {
  std::vector<std::string> command{tessera::testing::tessera_program(), "ckpt"};
  command.insert(command.end(), words.begin(), words.end());
  return tessera::testing::run_command(command);
}

inline void flip_bit(const std::filesystem::path& path, int64_t place) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(place);
  const int byte = file.get();
  file.seekp(place);
  file.put(static_cast<char>(byte ^ 4));
}

inline const std::string kGoldens = TESSERA_FORMAT_GOLDENS;

} // namespace tessera::checkpoint
