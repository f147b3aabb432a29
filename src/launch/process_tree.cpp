#include "launch/process_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/unique_fd.h"

namespace tessera::launch {
namespace {

std::optional<ProcessInfo> read_process(const char* pid) {
  const std::string path = std::string("/proc/") + pid + "/stat";
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t size = fd ? ::read(fd.get(), text, sizeof(text) - 1) : -1;
  if (size <= 0) {
    return std::nullopt;
  }
  text[size] = '\0';
  // "pid (name) state ppid pgrp ...", where the name may hold any character.
  const char* after_name = std::strrchr(text, ')');
  char state = '\0';
  ProcessInfo info;
  if (after_name == nullptr ||
      std::sscanf(
          after_name + 1, " %c %d %d", &state, &info.parent, &info.group) !=
          3) {
    return std::nullopt;
  }
  info.pid = std::atoi(pid);
  info.zombie = state == 'Z' || state == 'X';
  return info;
}

using Children = std::multimap<pid_t, ProcessInfo>;

Children read_processes() {
  Children by_parent;
  struct Close {
    void operator()(DIR* folder) const {
      ::closedir(folder);
    }
  };
  const std::unique_ptr<DIR, Close> folder(::opendir("/proc"));
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') {
      continue;
    }
    if (const auto info = read_process(entry->d_name)) {
      by_parent.emplace(info->parent, *info);
    }
  }
  return by_parent;
}

} // namespace

SubreaperScope::SubreaperScope() {
  ::prctl(PR_GET_CHILD_SUBREAPER, &saved_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

SubreaperScope::~SubreaperScope() {
  ::prctl(PR_SET_CHILD_SUBREAPER, saved_);
}

ProcessTree::ProcessTree() {
  const Children by_parent = read_processes();
  const auto [begin, end] = by_parent.equal_range(::getpid());
  for (auto child = begin; child != end; ++child) {
    foreign_.insert(child->second.pid);
  }
}

std::vector<ProcessInfo> ProcessTree::descendants() const {
  const Children by_parent = read_processes();
  std::vector<ProcessInfo> result;
  auto append_children = [&](pid_t parent) {
    const auto [begin, end] = by_parent.equal_range(parent);
    for (auto child = begin; child != end; ++child) {
      if (!foreign_.contains(child->second.pid)) {
        result.push_back(child->second);
      }
    }
  };
  append_children(::getpid());
  // NOLINTNEXTLINE(modernize-loop-convert): `result` grows meanwhile
  for (size_t i = 0; i < result.size(); ++i) {
    append_children(result[i].pid);
  }
  return result;
}

void ProcessTree::reap_orphans(const std::set<pid_t>& keep) const {
  const pid_t self = ::getpid();
  for (const ProcessInfo& process : descendants()) {
    if (process.parent == self && process.zombie &&
        !keep.contains(process.pid)) {
      ::waitpid(process.pid, nullptr, WNOHANG);
    }
  }
}

} // namespace tessera::launch
