#pragma once

#include <optional>
#include <string>

namespace tessera::launch {

/// A small key-value store that the launchers of all nodes share, hosted by
/// node 0. It must be empty at the start of a run. Calls come from the thread
/// in run(), and ranks' output and signals wait for them: they return or throw
/// within a second or two, also when the network is down. Any exception means
/// that the other nodes cannot be reached any more, and ends the run.
class Channel {
 public:
  virtual ~Channel() = default;

  /// Sets or replaces a value.
  virtual void set(const std::string& key, const std::string& bytes) = 0;
  /// Sets a value unless there is one, atomically over all nodes. Returns the
  /// one that holds.
  virtual std::string set_if_absent(
      const std::string& key,
      const std::string& bytes) = 0;
  /// The value, or nothing if the key has not been set yet.
  virtual std::optional<std::string> get(const std::string& key) = 0;
};

} // namespace tessera::launch
