#include "exported/operator_name.h"

#include <string_view>

namespace tessera::exported {
namespace {

constexpr std::string_view kOps = "torch.ops.";

/// None if the target is not written as an operator is.
std::optional<c10::OperatorName> parse_operator(const std::string& target) {
  if (!target.starts_with(kOps)) {
    return std::nullopt;
  }
  const std::string rest = target.substr(kOps.size());
  const size_t space = rest.find('.');
  const size_t overload = rest.rfind('.');
  if (space == rest.npos || overload == space) {
    return std::nullopt;
  }
  std::string name = rest.substr(overload + 1);
  return c10::OperatorName(
      rest.substr(0, space) +
          "::" + rest.substr(space + 1, overload - space - 1),
      name == "default" ? "" : std::move(name));
}

} // namespace

std::optional<c10::OperatorHandle> find_operator(const std::string& target) {
  const auto name = parse_operator(target);
  return name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
}

std::string operator_text(const std::string& target) {
  const auto name = parse_operator(target);
  return name ? c10::toString(*name) : target;
}

} // namespace tessera::exported
