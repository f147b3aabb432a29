// What a pickle's program leaves behind, before it is given a meaning.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/format/pickle_globals.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::format {

constexpr uint32_t kNoNode = UINT32_MAX;

/// [Note: a graph, then a tree]
///
/// Through the memo a pickle can name one value in many places, and put a
/// container into itself. So the machine makes nodes that refer to one another
/// by number, at most one for each byte of input. Only when the machine has
/// stopped is it known that there is no cycle, how deep the values nest and how
/// large the tree is that they stand for; then the tree is built. Owning
/// pointers would leak cycles, and building a tree from the start would let the
/// memo double its size with every few bytes.
struct Node {
  enum class Kind : uint8_t {
    None,
    Bool,
    Int,
    Float,
    Text,
    Bytes,
    List,
    Tuple,
    Set,
    Dict, // children: key, value, key, value
    Global,
    Call, // one child: the tuple of arguments
    Persistent, // one child: the id
  };

  Kind kind = Kind::None;
  GlobalRef global{}; // kGlobal, and what kCall calls
  uint32_t at = 0; // the opcode's place in the input
  uint32_t state = kNoNode; // kCall: what BUILD gave
  union {
    int64_t integer = 0; // kBool, kInt
    double number; // kFloat
  };
  std::string_view text; // kText, kBytes: in the input
  std::vector<uint32_t> children;
};

/// The tree below `root`. Throws FormatError if there is a cycle, for what
/// nests deeper than kMaxNesting or has more values than `input_bytes` allow,
/// and for calls with wrong arguments.
Value to_value(
    const std::vector<Node>& nodes,
    uint32_t root,
    uint64_t input_bytes);

constexpr size_t kMaxNesting = 128;

} // namespace tessera::format
