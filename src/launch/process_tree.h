#pragma once

#include <sys/types.h>

#include <set>
#include <vector>

namespace tessera::launch {

/// One line of the process table.
struct ProcessInfo {
  pid_t pid = 0;
  pid_t parent = 0;
  pid_t group = 0;
  /// Has ended, but its parent has not asked for its status yet.
  bool zombie = false;
};

/// While it lives, processes that lose their parent below this process become
/// its children, so that none can escape. The destructor restores the flag.
class SubreaperScope {
 public:
  SubreaperScope();
  ~SubreaperScope();
  SubreaperScope(const SubreaperScope&) = delete;
  SubreaperScope& operator=(const SubreaperScope&) = delete;

 private:
  int saved_ = 0;
};

/// The processes that descend from this one, except those below children that
/// were there when the object was made: they belong to somebody else.
class ProcessTree {
 public:
  ProcessTree();

  /// A snapshot read from /proc, parents before their children.
  std::vector<ProcessInfo> descendants() const;

  /// Reaps direct children that have ended, except those in `keep`.
  void reap_orphans(const std::set<pid_t>& keep) const;

 private:
  std::set<pid_t> foreign_;
};

} // namespace tessera::launch
