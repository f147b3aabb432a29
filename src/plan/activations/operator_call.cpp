#include "plan/activations/operator_call.h"

#include <utility>
#include <variant>

#include "plan/activations/graph_names.h"

namespace tessera::plan {

using exported::Argument;

OperatorCall::OperatorCall(
    const exported::Node& node,
    const Names& names,
    std::vector<TensorShape> results,
    Device device,
    Tape& tape)
    : node_(node),
      names_(names),
      shapes_(std::move(results)),
      device_(device),
      tape_(tape) {
  for (const std::string& name : names_read(node)) {
    if (const auto found = names_.find(name); found != names_.end()) {
      tensors_.push_back(found->second);
      if (const auto& param = tape_.at(found->second).seen) {
        tape_.touch(*param);
      }
    }
  }
}

OperatorCall::~OperatorCall() {
  for (const ValueId value : owned_) {
    tape_.heap.release(tape_.at(value).block);
  }
}

std::string_view OperatorCall::name_of(const exported::Node& node) {
  std::string_view name = node.target;
  constexpr std::string_view kAten = "torch.ops.aten.";
  if (!name.starts_with(kAten)) {
    return name;
  }
  name.remove_prefix(kAten.size());
  return name.substr(0, name.find('.'));
}

const Argument* OperatorCall::argument(std::string_view name) const {
  for (const exported::NamedArgument& input : node_.inputs) {
    if (input.name == name) {
      return &input.argument;
    }
  }
  return nullptr;
}

std::optional<ValueId> OperatorCall::tensor(std::string_view name) const {
  const Argument* given = argument(name);
  if (given == nullptr) {
    return std::nullopt;
  }
  for (const std::string& tensor : tensor_names(*given)) {
    if (const auto found = names_.find(tensor); found != names_.end()) {
      return found->second;
    }
  }
  return std::nullopt;
}

std::optional<bool> OperatorCall::flag(std::string_view name) const {
  const Argument* given = argument(name);
  const auto* value = given ? std::get_if<bool>(&given->value) : nullptr;
  return value ? std::optional(*value) : std::nullopt;
}

std::optional<double> OperatorCall::number(std::string_view name) const {
  const Argument* given = argument(name);
  if (given == nullptr) {
    return std::nullopt;
  }
  if (const auto* whole = std::get_if<int64_t>(&given->value)) {
    return static_cast<double>(*whole);
  }
  const auto* value = std::get_if<double>(&given->value);
  return value ? std::optional(*value) : std::nullopt;
}

std::optional<std::string> OperatorCall::text(std::string_view name) const {
  const Argument* given = argument(name);
  const auto* value = given ? std::get_if<std::string>(&given->value) : nullptr;
  return value ? std::optional(*value) : std::nullopt;
}

ValueId OperatorCall::make(const TensorShape& shape) {
  const ValueId value =
      tape_.add({.shape = shape, .block = tape_.heap.allocate(shape.bytes())});
  owned_.push_back(value);
  return value;
}

ValueId OperatorCall::detached(ValueId of, const TensorShape& shape) {
  const Value& base = tape_.at(of);
  const Value seen{
      .shape = shape,
      .block = base.block,
      .is_constant = base.is_constant,
      .seen = base.seen};
  tape_.heap.retain(seen.block);
  owned_.push_back(tape_.add(seen));
  return owned_.back();
}

ValueId OperatorCall::view(ValueId of, const TensorShape& shape, Flow flow) {
  const ValueId result = detached(of, shape);
  tape_.record({.results = {result}, .inputs = {{of, flow}}, .saved = {}});
  return result;
}

void OperatorCall::drop(ValueId value) {
  if (std::erase(owned_, value) > 0) {
    tape_.heap.release(tape_.at(value).block);
  }
}

} // namespace tessera::plan
