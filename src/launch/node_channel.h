// The channel to the other nodes, with patience and with errors for the user.
#pragma once

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

#include "launch/launcher_channel.h"

namespace tessera::launch {

/// The nodes cannot begin or go on together. The text is for the user; the
/// exit code is the run's.
class NodesError : public std::runtime_error {
 public:
  explicit NodesError(const std::string& message, int exit_code = 1)
      : std::runtime_error(message), exit_code_(exit_code) {}

  int exit_code() const {
    return exit_code_;
  }

 private:
  int exit_code_;
};

/// The other nodes can no longer be reached.
class ChannelLost : public NodesError {
 public:
  using NodesError::NodesError;
};

/// "60 s", rounded up.
std::string seconds_text(std::chrono::steady_clock::duration duration);

/// Takes a slow node 0 for one that has nothing to say yet, until its patience
/// ends. All calls throw ChannelLost.
class NodeChannel {
 public:
  /// Borrows the channel.
  NodeChannel(LauncherChannel* channel, std::chrono::seconds patience)
      : channel_(channel), patience_(patience) {}

  void set_patience(std::chrono::seconds patience) {
    patience_ = patience;
  }
  /// Returns nothing once node 0 is found, else why it is not.
  std::optional<std::string> connect();
  void set(const std::string& key, const std::string& bytes);
  void set_unless_set(const std::string& key, const std::string& bytes);
  std::optional<std::string> get(const std::string& key);

 private:
  using Clock = std::chrono::steady_clock;

  LauncherChannel* channel_;
  std::chrono::seconds patience_;
  Clock::time_point last_answer_;
};

} // namespace tessera::launch
