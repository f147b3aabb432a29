// What a forward keeps for backward, and how backward uses it up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "plan/activations/heap.h"
#include "plan/activations/shape.h"
#include "plan/model.h"

namespace tessera::plan {

/// A tensor of the step. Names of the graph and gradients refer to it by number
/// when its memory may be gone.
struct Value {
  TensorShape shape;
  Heap::Block block = 0;
  bool needs_gradient = false;
  bool is_constant = false; // the same in every step
  bool is_buffer = false; // of the model
  std::optional<ParamPlace> param = std::nullopt; // that it is
  std::optional<ParamPlace> seen = std::nullopt; // whose memory it has
};
using ValueId = size_t;

/// How backward makes the gradient of an input.
enum class Flow : uint8_t {
  Pass, // it is the gradient of the result, or a view of it
  Make, // it is new
  MakeFromProduct, // new, by a sum over one that is as large as the result
};

/// One node of autograd's graph.
struct GradNode {
  struct Input {
    ValueId value = 0;
    Flow flow = Flow::Make;
  };
  std::vector<ValueId> results;
  std::vector<Input> inputs;
  std::vector<ValueId> saved; // whose memory is kept
  int64_t temporary = 0; // bytes that backward allocates and frees
  double flops = 0;
  /// Runs in place of the above, if results have gradients.
  std::function<void()> run = nullptr;
};

/// [Note: planned activations]
///
/// A plan of an exported program runs its graph once with shapes in place of
/// tensors. Each operator says which memory its results have, new or that of an
/// operand, what autograd saves of it, and how its backward makes gradients.
/// Memory is freed when its last owner lets it go: names of the graph, nodes of
/// autograd, and gradients on their way.
///
/// Autograd runs the node that was made last of those that are ready. So it
/// runs them in the opposite order in which forward made them, and the tape is
/// walked from its end.
class Tape {
 public:
  explicit Tape(StepEvents& events) {
    begin(events);
  }

  Heap heap;
  /// Off under torch.no_grad().
  bool records = true;

  /// Where events go from now on.
  void begin(StepEvents& events) {
    events_ = &events;
    heap.note_in(events);
  }
  StepEvents& events() {
    return *events_;
  }

  ValueId add(Value value);
  const Value& at(ValueId value) const {
    return values_[value];
  }
  bool needs_gradient(ValueId value) const {
    return records && values_[value].needs_gradient;
  }
  void set_constant(ValueId value) {
    values_[value].is_constant = true;
  }

  /// Keeps what is saved and notes the node, if an input needs a gradient. The
  /// results need one then.
  void record(GradNode node);

  /// The nodes from now on are of a part of their own, until its end. Returns
  /// the ones so far.
  std::vector<GradNode> begin_part();
  /// Takes the nodes of the part, and goes on with the ones before.
  std::vector<GradNode> end_part(std::vector<GradNode> before);
  /// Frees what nodes have saved.
  void drop(const std::vector<GradNode>& nodes);
  void drop(const GradNode& node);

  /// Drops the nodes from which no way leads to the value.
  void keep_only_for(std::optional<ValueId> value);

  /// The gradient of a value, which becomes owned by it.
  void add_gradient(ValueId value, Heap::Block gradient);
  std::optional<Heap::Block> take_gradient(ValueId value);
  /// Runs the nodes, the last one first.
  void run_backward(const std::vector<GradNode>& nodes);

  void touch(const ParamPlace& param);
  void compute(double flops);

 private:
  void run(const GradNode& node);
  void make_gradients(
      const GradNode& node,
      const std::vector<Heap::Block>& incoming);
  void note_param_gradient(const ParamPlace& param);

  StepEvents* events_ = nullptr;
  std::deque<Value> values_; // references stay valid
  std::vector<std::optional<Heap::Block>> gradients_; // by value
  std::vector<GradNode> nodes_;
};

} // namespace tessera::plan
