#include "engine/caller.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <array>

namespace tessera::engine {

bool is_called_by(std::string_view part) {
  std::array<void*, 48> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  for (int i = 0; i < count; ++i) {
    Dl_info info{};
    if (dladdr(frames[static_cast<size_t>(i)], &info) != 0 &&
        info.dli_sname != nullptr &&
        std::string_view(info.dli_sname).find(part) != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

} // namespace tessera::engine
