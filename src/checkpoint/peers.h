// The ranks that save or load together; one process before init().
#pragma once

#include <tessera/comm/group.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_vector.h"

namespace tessera::checkpoint {

class Peers {
 public:
  /// The group, else the world, else this process.
  explicit Peers(const std::optional<Group>& group);

  int rank() const;
  int size() const;
  bool is_root() const {
    return rank() == 0;
  }
  /// None for one process.
  const std::optional<Group>& group() const {
    return group_;
  }
  std::vector<Group> groups() const;
  /// Cores for each rank of this host, at least 1 and at most `most`.
  int cores_each(int most) const;
  /// The same ranks with a group that nobody else uses. Collective.
  Peers apart(std::string_view name) const;

  /// Every rank's bytes on rank 0.
  std::vector<Bytes> gather(Bytes bytes, std::string_view label) const;
  /// What rank 0 has.
  Bytes broadcast(Bytes bytes, std::string_view label) const;

 private:
  std::optional<Group> group_;
};

/// What became of something that a rank did, on its way to the others.
struct Outcome {
  /// From what may be another rank's fault to what is this one's.
  enum class Kind : uint8_t {
    Ok,
    Error,
    Access,
    Other,
    ValueError,
    Disagreement,
  };

  Kind kind = Kind::Ok;
  std::string text;
  Bytes result;

  /// Runs `body`, whose result it takes, and keeps what it throws as text.
  static Outcome of(const std::function<Bytes()>& body);
  static Outcome from_bytes(const Bytes& bytes);
  Bytes to_bytes() const;
  /// Throws it, unless it is kOk.
  void raise() const;
};

/// Runs `body`, which must not communicate, on every rank. If it throws on any,
/// all throw the same kind of error: where it did, with its own words.
/// Collective.
void settle(const Peers& peers, const std::function<void()>& body);

} // namespace tessera::checkpoint
