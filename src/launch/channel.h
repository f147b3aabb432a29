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
/// node 0. It must be empty at the start of a run. Calls come from the thread
/// in run(), and ranks' output and signals wait for them: they return or throw
/// within a second or two, also when the network is down. get() throws
/// ChannelSlow where it may be asked again; any other exception means that the
/// other nodes cannot be reached any more, and ends the run.
class Channel {
 public:
  virtual ~Channel() = default;

  /// Looks for node 0: nothing once it is found, else why it is not. Called
  /// again and again at the start; the other calls come after it.
  virtual std::optional<std::string> connect() {
    return std::nullopt;
  }
  /// Sets or replaces a value; where node 0 is slow, later.
  virtual void set(const std::string& key, const std::string& bytes) = 0;
  /// Sets a value unless there is one, atomically over all nodes; where node 0
  /// is slow, later. get() tells which one holds.
  virtual void set_unless_set(
      const std::string& key,
      const std::string& bytes) = 0;
  /// The value, or nothing if the key has not been set yet.
  virtual std::optional<std::string> get(const std::string& key) = 0;
};

} // namespace tessera::launch
