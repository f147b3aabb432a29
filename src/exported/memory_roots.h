// Which values of a code may share memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <vector>

#include "exported/code.h"
#include "exported/weights.h"

namespace tessera::exported {

/// Follows memory through a code: back from what is written in place or
/// returned to the steps and weights that it may come from, its roots, and on
/// from those to all that may be views of it. Takes time in proportion to the
/// code.
class MemoryRoots {
 public:
  explicit MemoryRoots(const Code& code);

  /// Whether a result of the step may be written in place, by any step, or be
  /// returned.
  bool is_kept(size_t step) const {
    return kept_[step];
  }
  /// Whether a step may write to what the code is given.
  bool writes_inputs() const {
    return writes_inputs_;
  }
  /// Weights that a step may write to.
  const std::set<uint32_t>& written_weights() const {
    return written_.weights;
  }

 private:
  /// Some of the values.
  struct Values {
    void add(const Source& source);
    void add(const Operand& operand);
    void add_results(const Step& step);
    bool contains(const Source& source) const;
    bool contains(const Operand& operand) const;
    bool contains_result(const Step& step) const;

    std::vector<bool> slots;
    std::set<uint32_t> weights;
  };

  void go_back(Step& step, size_t number);
  void go_on(Step& step, size_t number);

  Values written_; // themselves, or a view of them
  Values returned_; // the same
  Values touched_; // views of what is written
  std::vector<bool> kept_; // steps
  bool writes_inputs_ = false;
};

/// By weight: whether it is a constant that stays as it is, because none of
/// the codes writes to its memory and no parameter or buffer shares it.
std::vector<bool> fixed_weights(
    const std::vector<WeightSpec>& specs,
    const std::vector<at::Tensor>& weights,
    const std::vector<const Code*>& codes);

/// Whether results of the step may share memory with its operands although the
/// schema does not say so: operators that are made of others return what those
/// return.
bool hides_views(const Step& step);

/// Whether the step changes values in place. torch.tensor() in Python's forward
/// ends in a detach_(), which is in place and changes none.
bool writes_values(const Step& step);

} // namespace tessera::exported
