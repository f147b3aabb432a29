// A graph as it is run: a flat list of steps on numbered slots.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tessera::exported {

/// [Note: flat programs]
///
/// When a file is loaded, each of its graphs becomes a Code: a list of Steps,
/// one for each node. Names are gone: values live in numbered slots of a Frame,
/// weights and constants in lists of their own, and operators are found. So a
/// run looks up nothing; it moves values and calls operators.
///
/// The last step that reads a slot moves the value out, so that an activation
/// that autograd does not keep is freed inside the operator that reads it last,
/// as early as in Python. Results that nothing reads are dropped at once.
///
/// A Code never changes once it is made; copies of a model share it.

class Frame;
struct Node;

/// Where a value comes from.
struct Source {
  enum class From : uint8_t {
    Constant, // of the Code
    Slot, // stays there
    LastUse, // is moved out of the slot
    Weight, // a parameter, a buffer or a constant tensor of the model
  };
  From from = From::Constant;
  uint32_t index = 0;
};

/// One argument of a step.
struct Operand {
  enum class Form : uint8_t {
    Value, // as it is
    Wrapped, // a number where an operator takes a tensor
    Float, // a number where an operator takes a float
    Tensors, // these and the next are lists
    OptionalTensors,
    Ints,
    Floats,
    Bools,
    Numbers,
    Strings,
  };
  Form form = Form::Value;
  Source source; // not for lists
  std::vector<Source> elements; // of a list
};

/// Where a value goes that a step gives.
struct Result {
  static constexpr int32_t kDropped = -1;

  bool is_list = false; // then one slot for each element
  std::vector<int32_t> slots;
};

/// One node of a graph.
struct Step {
  Step() = default;
  virtual ~Step() = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  virtual void run(Frame& frame) const = 0;
  /// Graphs inside the step.
  virtual std::vector<struct Code*> nested() {
    return {};
  }

  std::vector<Operand> operands;
  std::vector<Result> results;
  /// Operands that the step writes to, and those whose memory a result may
  /// share.
  std::vector<size_t> written;
  std::vector<size_t> shared;
  /// Operands on which nothing depends but what the step writes to them, or
  /// gives as their new value: what is changed in place, and the statistics of
  /// a batch norm that computes with those of its input.
  std::vector<size_t> unread;
  /// The node that it stands for; the program lives as long as the Code.
  const Node* node = nullptr;
};

/// See [Note: flat programs].
struct Code {
  size_t num_slots = 0;
  std::vector<int32_t> inputs; // slots; -1 if nothing reads the input
  std::vector<std::unique_ptr<Step>> steps;
  std::vector<Operand> outputs;
  std::vector<c10::IValue> constants;
};

/// What the steps of a run need besides values. A part that backward runs again
/// keeps a copy, since the model may be gone by then.
struct RunScope {
  std::shared_ptr<const std::vector<at::Tensor>> weights;
  std::shared_ptr<const void> code; // that keeps all code of the program alive
};

/// The values of one run.
class Frame {
 public:
  Frame(const Code& code, const RunScope& scope)
      : code_(code),
        scope_(scope),
        weights_(scope.weights->data()),
        slots_(code.num_slots) {}

  c10::IValue take(const Source& source) {
    switch (source.from) {
      case Source::From::Constant:
        return code_.constants[source.index];
      case Source::From::Slot:
        return slots_[source.index];
      case Source::From::LastUse:
        return std::move(slots_[source.index]);
      case Source::From::Weight:
        return weights_[source.index];
    }
    return {};
  }
  c10::IValue take(const Operand& operand) {
    return operand.form == Operand::Form::Value ? take(operand.source)
                                                : take_converted(operand);
  }
  /// The values of several operands, lists taken apart.
  std::vector<c10::IValue> take_all(std::span<const Operand> operands);

  void set(int32_t slot, c10::IValue value) {
    if (slot != Result::kDropped) {
      slots_[static_cast<size_t>(slot)] = std::move(value);
    }
  }
  void set(const Result& result, c10::IValue value) {
    if (!result.is_list) {
      set(result.slots.front(), std::move(value));
    } else {
      set_elements(result, value);
    }
  }
  /// One value for each slot of all results.
  void set_all(
      std::span<const Result> results,
      std::vector<c10::IValue> values);

  const RunScope& scope() const {
    return scope_;
  }
  /// Reused by steps; empty between them.
  std::vector<c10::IValue>& stack() {
    return stack_;
  }

 private:
  c10::IValue take_converted(const Operand& operand);
  void set_elements(const Result& result, const c10::IValue& list);

  const Code& code_;
  const RunScope& scope_;
  const at::Tensor* weights_;
  std::vector<c10::IValue> slots_;
  std::vector<c10::IValue> stack_;
};

/// Runs a whole code: values in, values out. An error names the node.
std::vector<c10::IValue> run(
    const Code& code,
    const RunScope& scope,
    std::vector<c10::IValue> inputs);

/// A list for an operator that takes elements of this kind.
c10::IValue make_list(Operand::Form form, std::vector<c10::IValue> elements);
/// A number as the tensor that Python makes of it: it does not decide the
/// dtype of a result, where a tensor would.
at::Tensor wrapped_number(const c10::IValue& number);

} // namespace tessera::exported
