#include "comm/launcher_process.h"

#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace tessera::comm {
namespace {

struct Ancestor {
  std::string name;
  pid_t parent = 0;
  std::string started; // in ticks since the host booted
};

std::string read_file(pid_t pid, const char* name) {
  std::ifstream file(fmt::format("/proc/{}/{}", pid, name), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<Ancestor> read_ancestor(pid_t pid) {
  // "pid (name) state ppid ...", where the name may hold any character.
  const std::string stat = read_file(pid, "stat");
  const size_t open = stat.find('(');
  const size_t close = stat.rfind(')');
  if (open == std::string::npos || close == std::string::npos) {
    return std::nullopt;
  }
  Ancestor result{.name = stat.substr(open + 1, close - open - 1)};
  std::istringstream in(stat.substr(close + 1));
  const std::vector<std::string> fields{
      std::istream_iterator<std::string>(in), {}};
  constexpr size_t kParent = 1;
  constexpr size_t kStarted = 19;
  if (fields.size() <= kStarted) {
    return std::nullopt;
  }
  result.parent = std::atoi(fields[kParent].c_str());
  result.started = fields[kStarted];
  return result;
}

/// Whether a process with this environment was started with the same value of
/// `name` as this process. True also if this process has no such variable.
bool shares(const std::string& environment, const char* name) {
  const char* value = std::getenv(name);
  const std::string entry = value == nullptr
      ? std::string()
      : fmt::format("{}={}", name, value) + '\0';
  return environment.starts_with(entry) ||
      environment.find('\0' + entry) != std::string::npos;
}

bool is_part_of_this_rank(pid_t pid, const Ancestor& ancestor) {
  if (ancestor.name.find("pmi_proxy") != std::string::npos) {
    return false; // MPICH's and Intel MPI's own, also inside of a rank
  }
  const std::string environment = read_file(pid, "environ");
  return shares(environment, "PMI_RANK") && shares(environment, "PMI_FD");
}

} // namespace

std::string pmi_launcher_identity() {
  for (pid_t pid = getppid(); pid > 0;) {
    const auto ancestor = read_ancestor(pid);
    if (!ancestor) {
      return "";
    }
    if (!is_part_of_this_rank(pid, *ancestor)) {
      return fmt::format("pmi.{}.{}", pid, ancestor->started);
    }
    pid = ancestor->parent;
  }
  return "";
}

} // namespace tessera::comm
