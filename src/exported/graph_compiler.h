// Makes the code of one graph.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exported/arguments.h"
#include "exported/code.h"
#include "exported/compiler.h"
#include "exported/format/program.h"
#include "exported/placement.h"

namespace tessera::exported {

class GraphCompiler {
 public:
  GraphCompiler(
      const Graph& graph,
      const Placement& placement,
      Refusals& refusals);

  /// A weight of the program.
  void define(const std::string& name, Source source);
  /// The next input of the code: a name, or a constant, which is not read.
  void add_input(const Argument& argument);
  void skip_input();

  /// The code of the whole graph; once.
  Code compile();

 private:
  void add_node(const Node& node);
  std::unique_ptr<Step> make_step(const Node& node);
  std::unique_ptr<Step> make_operator(const Node& node);
  std::unique_ptr<Step> make_function(const Node& node);
  std::unique_ptr<Step> make_nested(const Node& node);
  Code nested_code(const Argument& argument);
  Result result_of(const Argument& output);
  int32_t new_slot(const std::string& name);

  const Graph& graph_;
  const Placement& placement_;
  Refusals& refusals_;
  Code code_;
  Arguments arguments_;
};

/// Takes the marks away, so that steps can be moved.
void unmark_last_uses(Code& code);
/// Marks the last use of each slot, and drops what nothing reads.
void mark_last_uses(Code& code);

} // namespace tessera::exported
