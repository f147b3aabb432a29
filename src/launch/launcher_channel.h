#pragma once

#include <optional>
#include <stdexcept>
#include <string>

namespace tessera::launch {

/// Node 0 has not answered yet: suspended, perhaps, or far away.
struct ChannelSlow : std::runtime_error {
  ChannelSlow() : std::runtime_error("it does not answer.") {}
};

/// A small key-value store that the launchers of all nodes share, hosted by
/// node 0. The store must be empty at the start of a run. Calls come from the
/// thread in run(), and the ranks' output and signals wait for each call: calls
/// return or throw within a second or two, also when the network is down. get()
/// throws ChannelSlow if it may be called again; any other exception means that
/// the other nodes can no longer be reached, and ends the run.
class LauncherChannel {
 public:
  virtual ~LauncherChannel() = default;

  /// Looks for node 0: returns nothing once node 0 is found, else why it is
  /// not. Called repeatedly at the start, before any other call.
  virtual std::optional<std::string> connect() {
    return std::nullopt;
  }
  /// Sets or replaces a value; if node 0 is slow, after the call has returned.
  virtual void set(const std::string& key, const std::string& bytes) = 0;
  /// Sets a value unless the key has one, atomically over all nodes; if node 0
  /// is slow, after the call has returned. get() tells which value holds.
  virtual void set_unless_set(
      const std::string& key,
      const std::string& bytes) = 0;
  /// The value, or nothing if the key has not been set yet.
  virtual std::optional<std::string> get(const std::string& key) = 0;
};

} // namespace tessera::launch
