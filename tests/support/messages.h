// The messages between controller and workers of a test pool.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

/// One message: a kind and some texts. Sent as one packet.
struct Message {
  enum class Kind : char {
    Run = 'R', // to a worker: test name, store prefix, store port
    Started = 'S', // from a worker: its world is made, the test begins
    Failure = 'F', // from a worker: file, line, text
    Property = 'P', // from a worker: key, value
    Done = 'D', // from a worker: the test is over
  };

  Kind kind = Kind::Done;
  std::vector<std::string> fields;
};

/// The last thing that a worker writes when it is asked where it stands.
inline constexpr char kEndOfDump[] = "(end of stack)\n";

/// False if the other end has closed.
bool send_message(int fd, const Message& message);
/// Waits for a message; nothing if the other end has closed.
std::optional<Message> receive_message(int fd);

} // namespace tessera::testing
