#include "exported/writes.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "exported/memory_roots.h"
#include "exported/steps.h"

namespace tessera::exported {
namespace {

/// Operators that are made of others, but whose results are always new: they
/// read large weights, which need not be copied then.
constexpr std::array<std::string_view, 5> kComputed{
    "aten::linear",
    "aten::matmul",
    "aten::conv1d",
    "aten::conv2d",
    "aten::conv3d"};

bool may_hide_views(const Step& step) {
  const auto* call = dynamic_cast<const OperatorStep*>(&step);
  return hides_views(step) &&
      std::find(kComputed.begin(), kComputed.end(), call->op.schema().name()) ==
      kComputed.end();
}

bool is_among(const std::vector<size_t>& indices, size_t index) {
  return std::find(indices.begin(), indices.end(), index) != indices.end();
}

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
    for (const Operand& output : code.outputs) {
      read(roots_of(output));
    }
  }

  const Writes& written() const {
    return written_;
  }
  const std::set<uint32_t>& read_weights() const {
    return read_;
  }

 private:
  static void add(Writes& to, const Writes& more) {
    to.weights.insert(more.weights.begin(), more.weights.end());
    to.perhaps.insert(more.perhaps.begin(), more.perhaps.end());
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

  void read(const Writes& roots) {
    read_.insert(roots.weights.begin(), roots.weights.end());
    read_.insert(roots.perhaps.begin(), roots.perhaps.end());
  }

  void follow(Step& step) {
    const bool hides = may_hide_views(step);
    Writes of_results;
    for (size_t i = 0; i < step.operands.size(); ++i) {
      const Writes roots = roots_of(step.operands[i]);
      const bool is_shared = is_among(step.shared, i);
      if (is_shared) {
        add(of_results, roots);
      } else if (hides) {
        of_results.perhaps.insert(roots.weights.begin(), roots.weights.end());
        of_results.perhaps.insert(roots.perhaps.begin(), roots.perhaps.end());
      }
      if (is_among(step.written, i)) {
        add(written_, roots);
      }
      const bool is_view = is_shared && !is_among(step.written, i);
      if (!is_view && !is_among(step.unread, i)) {
        read(roots);
      }
    }
    follow_nested(step, of_results);
    for (const Result& result : step.results) {
      for (const int32_t slot : result.slots) {
        if (slot != Result::kDropped) {
          roots_[static_cast<size_t>(slot)] = of_results;
        }
      }
    }
  }

  /// The results of graphs may be any of their operands.
  void follow_nested(Step& step, Writes& of_results) {
    bool writes_inputs = false;
    for (const Code* code : step.nested()) {
      const Tracker inside(*code);
      const Writes& written = inside.written();
      written_.weights.insert(written.weights.begin(), written.weights.end());
      written_.perhaps.insert(written.perhaps.begin(), written.perhaps.end());
      read_.insert(inside.read_.begin(), inside.read_.end());
      writes_inputs = writes_inputs || !written.inputs.empty();
    }
    if (!step.nested().empty()) {
      for (const Operand& operand : step.operands) {
        add(of_results, roots_of(operand));
      }
    }
    if (writes_inputs) {
      add(written_, of_results);
    }
  }

  std::vector<Writes> roots_; // by slot
  Writes written_;
  std::set<uint32_t> read_;
};

void collect_names(
    const std::vector<Operand>& operands,
    std::set<uint32_t>& names) {
  const auto collect = [&](const Source& source) {
    if (source.from == Source::From::Weight) {
      names.insert(source.index);
    }
  };
  for (const Operand& operand : operands) {
    collect(operand.source);
    std::for_each(operand.elements.begin(), operand.elements.end(), collect);
  }
}

} // namespace

Writes writes_of(const Code& code) {
  return Tracker(code).written();
}

std::set<uint32_t> weights_read(const Code& code) {
  return Tracker(code).read_weights();
}

std::set<uint32_t> weights_named(const Code& code) {
  std::set<uint32_t> names;
  for (const auto& step : code.steps) {
    collect_names(step->operands, names);
    for (const Code* inside : step->nested()) {
      names.merge(weights_named(*inside));
    }
  }
  collect_names(code.outputs, names);
  return names;
}

} // namespace tessera::exported
