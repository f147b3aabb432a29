#include "exported/writes.h"

#include <vector>

namespace tessera::exported {
namespace {

/// Follows which slots may share memory with what comes from outside.
class Tracker {
 public:
  explicit Tracker(const Code& code) : roots_(code.num_slots) {
    for (size_t i = 0; i < code.inputs.size(); ++i) {
      if (code.inputs[i] != Result::kDropped) {
        roots_[static_cast<size_t>(code.inputs[i])].inputs.insert(i);
      }
    }
    for (const auto& step : code.steps) {
      follow(*step);
    }
  }

  const Writes& written() const {
    return written_;
  }

 private:
  static void add(Writes& to, const Writes& more) {
    to.weights.insert(more.weights.begin(), more.weights.end());
    to.inputs.insert(more.inputs.begin(), more.inputs.end());
  }

  Writes roots_of(const Source& source) const {
    Writes result;
    if (source.from == Source::From::Weight) {
      result.weights.insert(source.index);
    } else if (source.from != Source::From::Constant) {
      result = roots_[source.index];
    }
    return result;
  }
  Writes roots_of(const Operand& operand) const {
    Writes result = roots_of(operand.source);
    for (const Source& element : operand.elements) {
      add(result, roots_of(element));
    }
    return result;
  }

  void follow(Step& step) {
    Writes of_results;
    for (const size_t index : step.shared) {
      add(of_results, roots_of(step.operands[index]));
    }
    for (const size_t index : step.written) {
      add(written_, roots_of(step.operands[index]));
    }
    const auto codes = step.nested();
    if (!codes.empty()) { // its results may be any of its operands
      bool writes_inputs = false;
      for (const Code* code : codes) {
        const Writes inside = writes_of(*code);
        written_.weights.insert(inside.weights.begin(), inside.weights.end());
        writes_inputs = writes_inputs || !inside.inputs.empty();
      }
      for (const Operand& operand : step.operands) {
        add(of_results, roots_of(operand));
      }
      if (writes_inputs) {
        add(written_, of_results);
      }
    }
    for (const Result& result : step.results) {
      for (const int32_t slot : result.slots) {
        if (slot != Result::kDropped) {
          roots_[static_cast<size_t>(slot)] = of_results;
        }
      }
    }
  }

  std::vector<Writes> roots_; // by slot
  Writes written_;
};

} // namespace

Writes writes_of(const Code& code) {
  return Tracker(code).written();
}

} // namespace tessera::exported
