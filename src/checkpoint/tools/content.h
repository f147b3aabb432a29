// The content that a tool writes: entries of a source, chosen and renamed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/disk/source.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/dtype.h"

namespace tessera::checkpoint {

/// The keys that lead to a value. Some that are strings here were ints: only a
/// torch file can keep them as ints.
struct EntryPath {
  struct Key {
    format::DcpPath::Key key;
    bool was_int = false;
  };
  std::vector<Key> keys;

  std::string name() const; // joined by dots
  std::vector<format::DcpPath::Key> plain() const;
};

struct TensorEntry {
  std::string name;
  EntryPath path;
  const StoredTensor* tensor = nullptr;
  format::DType dtype = format::DType::Float32; // to write

  uint64_t bytes() const;
};

struct ValueEntry {
  std::string name;
  EntryPath path;
  const StoredValue* value = nullptr;
};

struct Content {
  const Source* source = nullptr;
  std::vector<TensorEntry> tensors;
  std::vector<ValueEntry> values;
  std::vector<EntryPath> empty_dicts;

  uint64_t bytes() const; // of the tensors
};

struct ContentOptions {
  /// Names that begin with one of these, up to a dot; empty for all names.
  std::vector<std::string> select;
  std::vector<std::string> exclude; // of these, names that do not begin so
  std::string strip_prefix; // taken off
  std::string add_prefix; // put in front, after that
  /// The dtype for floating-point tensors that have dims; a single number, such
  /// as a step, keeps its dtype.
  std::optional<format::DType> dtype;
};

/// Throws FileError if nothing is left, if a name does not have the prefix, or
/// if two names become the same. `source` must outlive the result.
Content choose(const Source& source, const ContentOptions& options);

} // namespace tessera::checkpoint
