#include "exported/argument_use.h"

#include <algorithm>

#include "exported/steps.h"

namespace tessera::exported {
namespace {

bool is_changed(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_statistic(const c10::Argument& formal) {
  return formal.name() == "running_mean" || formal.name() == "running_var";
}

std::optional<bool> in_training(
    const c10::FunctionSchema& schema,
    const Node& node) {
  for (const NamedArgument& input : node.inputs) {
    if (input.name == "training" || input.name == "train" ||
        input.name == "use_input_stats") {
      const bool* mode = std::get_if<bool>(&input.argument.value);
      return mode != nullptr ? std::optional(*mode) : std::nullopt;
    }
  }
  return !schema.name().ends_with("_no_training") &&
      !schema.name().ends_with("_no_update");
}

} // namespace

ArgumentUse::ArgumentUse(const c10::FunctionSchema& schema, const Node& node)
    : schema_(schema), in_training_(in_training(schema, node)) {
  const auto& returns = schema.returns();
  returns_arguments_ =
      std::all_of(returns.begin(), returns.end(), [](const auto& each) {
        return each.alias_info() != nullptr;
      });
}

bool ArgumentUse::is_written(const c10::Argument& formal) const {
  return is_changed(formal) ||
      (is_statistic(formal) && in_training_.value_or(true) &&
       !schema_.name().ends_with("_functional"));
}

bool ArgumentUse::is_unread(const c10::Argument& formal) const {
  return is_statistic(formal) ? in_training_.value_or(false)
                              : is_changed(formal) && returns_arguments_;
}

std::optional<Source> weight_written_to(const Step& step, size_t result) {
  const auto* call = dynamic_cast<const OperatorStep*>(&step);
  if (call == nullptr) {
    return std::nullopt;
  }
  const auto& schema = call->op.schema();
  const auto& returned = schema.returns().at(result);
  for (size_t i = 0; is_changed(returned) && i < step.operands.size(); ++i) {
    const auto& formal = schema.arguments()[i];
    const Operand& operand = step.operands[i];
    if (is_changed(formal) && operand.form == Operand::Form::Value &&
        operand.source.from == Source::From::Weight &&
        formal.alias_info()->beforeSets() ==
            returned.alias_info()->beforeSets()) {
      return operand.source;
    }
  }
  return std::nullopt;
}

} // namespace tessera::exported
