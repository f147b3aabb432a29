#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

namespace tessera::checkpoint {

/// A folder that is removed with the object.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern =
        std::filesystem::temp_directory_path() / "tessera-store-XXXXXX";
    path_ = std::filesystem::canonical(mkdtemp(pattern.data()));
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::filesystem::path operator/(const std::string& name) const {
    return path_ / name;
  }
  const std::filesystem::path& path() const {
    return path_;
  }

 private:
  std::filesystem::path path_;
};

} // namespace tessera::checkpoint
