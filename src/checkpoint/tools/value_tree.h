// A nested dictionary, put together from paths.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/pickle_value.h"
#include "checkpoint/tools/content.h"

namespace tessera::checkpoint {

class ValueTree {
 public:
  /// Throws FileError if something is in the way: a value where a dictionary
  /// should be, a dictionary where a list should be.
  void add(const EntryPath& path, format::Value value);

  /// Lists have None at positions where nothing was added.
  format::Value take() &&;

 private:
  struct Node {
    EntryPath::Key key;
    std::optional<format::Value> value; // none: has children
    std::vector<std::unique_ptr<Node>> children; // as they came
    std::map<std::string, Node*> by_key;
  };

  static format::Value build(Node& node);

  Node root_;
};

} // namespace tessera::checkpoint
