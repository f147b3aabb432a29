#include "exported/compiler.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "exported/graph_compiler.h"
#include "exported/overloaded.h"

namespace tessera::exported {

void refuse_all(const Refusals& refusals, const std::string& path) {
  std::string text;
  if (!refusals.missing.empty()) {
    text += fmt::format(
        "this LibTorch has no operator {}. Export the model with an older version of torch, or load the library that registers the operator.",
        fmt::join(refusals.missing, ", "));
  }
  for (const std::string& node : refusals.others) {
    text += (text.empty() ? "" : "\n  ") + node;
  }
  if (!text.empty()) {
    raise<c10::NotImplementedError>(
        {.call = "load_exported", .path = path}, text);
  }
}

Code compile(
    const Program& program,
    const WeightNumbers& weights,
    const Placement& placement,
    Refusals& refusals) {
  GraphCompiler compiler(program.graph, placement, refusals);
  for (const InputSpec& input : program.inputs) {
    std::visit(
        Overloaded{
            [&](const UserInput& user) { compiler.add_input(user.argument); },
            [&](const WrittenInput&) { compiler.skip_input(); },
            [&](const TokenInput& token) {
              refusals.others.insert(
                  "the input \"" + token.name +
                  "\" is a token that orders side effects, which is not supported.");
            },
            [&](const ObjectInput& object) {
              refusals.others.insert(fmt::format(
                  "\"{}\" is an object of class {}, which is never opened. Export the model without it.",
                  object.path,
                  object.object.class_name));
            },
            [&](const auto& weight) {
              compiler.define(
                  weight.name, {Source::From::Weight, weights.at(weight.name)});
            }},
        input);
  }
  return compiler.compile();
}

} // namespace tessera::exported
