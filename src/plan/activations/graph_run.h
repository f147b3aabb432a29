// Runs the nodes of graphs, with shapes in place of tensors.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exported/format/program.h"
#include "plan/activations/graph_names.h"
#include "plan/activations/graph_sizes.h"
#include "plan/activations/operator_call.h"
#include "plan/activations/tape.h"
#include "plan/setup.h"

namespace tessera::plan {

/// Names own the memory of their tensors as long as a node still reads them.
class GraphRun {
 public:
  GraphRun(Tape& tape, const GraphSizes& sizes, Device device)
      : tape_(tape), sizes_(sizes), device_(device) {}

  void hold(Names& names, const std::string& name, ValueId value);
  void let_go(Names& names, const std::string& name);
  void let_go(Names& names);

  /// Runs the nodes from `begin` up to `end`.
  void run(
      const exported::Graph& graph,
      size_t begin,
      size_t end,
      const LastReads& last,
      Names& names);

  /// The shape of a tensor of the graph. Throws exported::UnknownSize.
  TensorShape shape_at(const exported::Graph& graph, const std::string& name)
      const;

  /// Operators without a rule.
  const std::set<std::string>& unknown() const {
    return unknown_;
  }
  /// What is computed once, and read in each step.
  int64_t constant_bytes() const {
    return constant_bytes_;
  }
  Device device() const {
    return device_;
  }

 private:
  void run_node(
      const exported::Graph& graph,
      const exported::Node& node,
      Names& names);
  bool is_constant(
      const exported::Node& node,
      const std::vector<TensorShape>& shapes,
      const Names& names) const;
  void give_constants(
      const exported::Graph& graph,
      const std::vector<std::string>& given,
      const std::vector<TensorShape>& shapes,
      Names& names);
  void count_constants(const exported::Node& node, const Names& names);
  void apply_unknown(std::string_view name, OperatorCall& call);
  void see_write(const OperatorCall& call, Names& names);
  bool run_nested(const exported::Node& node, Names& names);
  void run_inside(
      const exported::Graph& graph,
      const std::vector<std::string>& operands,
      const std::vector<std::string>& given,
      Names& names);

  Tape& tape_;
  const GraphSizes& sizes_;
  const Device device_;
  std::set<std::string> unknown_;
  int64_t constant_bytes_ = 0;
  /// Constants by number: by what they are known, since a part may run twice.
  std::map<ValueId, std::pair<const exported::Graph*, std::string>> computed_;
  std::set<std::pair<const exported::Graph*, std::string>> counted_;
};

} // namespace tessera::plan
