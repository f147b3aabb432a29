// What a rank says it is about to do: compared before any data moves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// One rank's description of a collective. Trivially copyable: it travels
/// through shared memory and over the wire as it is. Ranks whose calls do not
/// match are at different points of their programs, or pass different shapes.
/// Texts are cut to fit; ranks compare a digest of the whole texts.
struct Call {
  char operation[24] = {}; // "all_gather_into"
  char detail[64] = {}; // "float32 [4, 8] SUM"
  char label[64] = {}; // what it is for: "layers.7"; may be empty
  uint64_t digest = 0; // of operation, shape, dtype, reduction, root and label
  uint64_t bytes = 0; // this rank's input
  uint64_t sequence = 0; // how many collectives came before it

  // Where this rank's input lies when it is shared memory itself; not compared.
  static constexpr uint64_t kNoSegment = 0;
  uint64_t segment = kNoSegment;
  uint64_t offset = 0;

  bool matches(const Call& other) const {
    return digest == other.digest && bytes == other.bytes &&
        sequence == other.sequence;
  }

  /// `all_reduce of float32 [4, 8] SUM (128 bytes) for "layers.7", call #12`
  std::string describe() const;
};

/// Copies `text` into a field of a Call with a closing zero. A text that is too
/// long loses its beginning: the end says more in
/// "layers.7.attention.query.weight".
template <size_t N>
void assign(char (&field)[N], std::string_view text) {
  text.remove_prefix(text.size() - std::min(text.size(), N - 1));
  field[text.copy(field, N - 1)] = '\0';
}

/// "rank 3" or "ranks 1, 3".
std::string rank_list(std::span<const int> ranks);

/// A line for each text that occurs: "\n  ranks 0, 2: text". `texts[i]` is the
/// text of rank `names[i]`.
std::string list_by_text(
    std::span<const std::string> texts,
    std::span<const int> names);

/// Nothing if all calls match; else one text, the same on every rank, that
/// says which ranks made which call. `calls[i]` is the call of rank `names[i]`.
std::optional<std::string> describe_mismatch(
    std::span<const Call> calls,
    std::span<const int> names);

} // namespace tessera::comm
