#include <vector>

#include "exported/graph_compiler.h"

namespace tessera::exported {
namespace {

/// Where each slot is read last.
class LastUses {
 public:
  explicit LastUses(size_t num_slots) : uses_(num_slots) {}

  void read(Source& source) {
    if (source.from == Source::From::Slot) {
      uses_[source.index] = &source;
    }
  }
  void read(std::vector<Operand>& operands) {
    for (Operand& operand : operands) {
      read(operand.source);
      for (Source& element : operand.elements) {
        read(element);
      }
    }
  }
  void drop_unread(int32_t& slot) const {
    if (slot != Result::kDropped &&
        uses_[static_cast<size_t>(slot)] == nullptr) {
      slot = Result::kDropped;
    }
  }
  void mark() const {
    for (Source* use : uses_) {
      if (use != nullptr) {
        use->from = Source::From::LastUse;
      }
    }
  }

 private:
  std::vector<Source*> uses_;
};

} // namespace

void unmark_last_uses(Code& code) {
  const auto unmark = [](std::vector<Operand>& operands) {
    for (Operand& operand : operands) {
      if (operand.source.from == Source::From::LastUse) {
        operand.source.from = Source::From::Slot;
      }
      for (Source& element : operand.elements) {
        if (element.from == Source::From::LastUse) {
          element.from = Source::From::Slot;
        }
      }
    }
  };
  for (const auto& step : code.steps) {
    unmark(step->operands);
  }
  unmark(code.outputs);
}

void mark_last_uses(Code& code) {
  LastUses uses(code.num_slots);
  for (const auto& step : code.steps) {
    uses.read(step->operands);
  }
  uses.read(code.outputs);
  for (int32_t& input : code.inputs) {
    uses.drop_unread(input);
  }
  for (const auto& step : code.steps) {
    for (Result& result : step->results) {
      for (int32_t& slot : result.slots) {
        uses.drop_unread(slot);
      }
    }
  }
  uses.mark();
}

} // namespace tessera::exported
