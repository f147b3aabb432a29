// The ranks that save or load together; one process before init().
#pragma once

#include <tessera/comm/group.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_vector.h"

namespace tessera::checkpoint {

/// Texts of all ranks, each different one once.
struct DistinctTexts {
  std::vector<Bytes> texts;
  std::vector<std::vector<size_t>> by_rank; // where in `texts` a rank's are
};

class Peers {
 public:
  /// The group if it is valid, else the world, else this process alone.
  explicit Peers(const std::optional<Group>& group);

  int rank() const;
  int size() const;
  bool is_root() const {
    return rank() == 0;
  }
  /// Empty for one process.
  const std::optional<Group>& group() const {
    return group_;
  }
  std::vector<Group> groups() const;
  /// Cores for each rank of this host, at least 1 and at most `most`.
  int cores_each(int most) const;
  /// The same ranks, with a group that nobody else uses. Collective.
  Peers apart(std::string_view name) const;

  /// Gathers every rank's bytes on rank 0.
  std::vector<Bytes> gather(Bytes bytes, std::string_view label) const;
  /// The same for texts that are often equal: each rank has as many, and of
  /// equal texts only the first rank sends its own. What the others know of
  /// each other is 16 bytes per text, by which each finds out what it sends.
  DistinctTexts gather_distinct(
      const std::vector<Bytes>& texts,
      std::string_view label) const;
  /// Returns what rank 0 has for this rank, which knows how long that is.
  Bytes scatter(
      const std::vector<Bytes>& by_rank,
      size_t own_bytes,
      std::string_view label) const;
  /// Returns the bytes of rank 0 on every rank.
  Bytes broadcast(Bytes bytes, std::string_view label) const;

 private:
  Bytes to_root(
      Bytes sent,
      const std::vector<int64_t>& sizes,
      std::string_view label) const;

  std::optional<Group> group_;
};

/// The outcome of something that a rank did, as sent to the other ranks.
struct Outcome {
  /// Ordered from errors that another rank may have caused to errors of this
  /// rank.
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

  /// Runs `body` and keeps its result, or the text of what it throws.
  static Outcome of(const std::function<Bytes()>& body);
  static Outcome from_bytes(const Bytes& bytes);
  Bytes to_bytes() const;
  /// Throws the error, unless the outcome is Kind::Ok.
  void raise() const;
};

/// Runs `body`, which must not communicate, on every rank. If it throws on any
/// rank, all ranks throw the same kind of error; the rank where it happened
/// throws its own message. Collective.
void settle(const Peers& peers, const std::function<void()>& body);

} // namespace tessera::checkpoint
