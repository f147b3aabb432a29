#include "comm/debugger.h"

#include <tessera/error.h>

#include <sys/prctl.h>
#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

namespace tessera::comm {
namespace {

bool is_traced() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("TracerPid:")) {
      return std::atoi(line.c_str() + std::strlen("TracerPid:")) != 0;
    }
  }
  return false;
}

} // namespace

void wait_for_debugger_if_asked(int rank, int world_size) {
  const char* text = std::getenv("TESSERA_DEBUG_RANK");
  if (text == nullptr || *text == '\0') {
    return;
  }
  char* end = nullptr;
  const long wanted = std::strtol(text, &end, 10);
  if (*end != '\0' || wanted < 0 || wanted >= world_size) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "TESSERA_DEBUG_RANK=\"{}\" is not a rank of this world, 0 to {}. Correct or unset it.",
            text,
            world_size - 1));
  }
  if (wanted != rank) {
    return;
  }
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); // a sibling of ours may attach
  const std::string line = fmt::format(
      "tessera: rank {} waits for a debugger: gdb -p {}\n", rank, getpid());
  std::fputs(line.c_str(), stderr);
  while (!is_traced()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

} // namespace tessera::comm
