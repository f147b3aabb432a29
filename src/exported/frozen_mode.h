// Whether a program was exported for training or for evaluation.
#pragma once

#include <string>
#include <vector>

#include "exported/format/program.h"

namespace tessera::exported {

/// Operators that do one thing in training and another in evaluation carry the
/// mode as a constant: dropout, batch norm. This is what they say.
class FrozenMode {
 public:
  explicit FrozenMode(const Program& program);

  /// Whether the program may run in a mode. One that has operators of both
  /// modes is for training: some of its modules were frozen on purpose.
  bool fits(bool is_training) const {
    return is_training ? in_evaluation_.empty() || !in_training_.empty()
                       : in_training_.empty();
  }
  /// The operators that are frozen to a mode, for messages: "dropout (3 times),
  /// batch_norm".
  std::string operators(bool is_training) const;

 private:
  void read(const Graph& graph);
  void read(const Node& node);

  std::vector<std::string> in_training_; // operators
  std::vector<std::string> in_evaluation_;
};

} // namespace tessera::exported
