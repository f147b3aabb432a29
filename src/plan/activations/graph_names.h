// Which names the nodes of a graph read and give, and until when.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "exported/format/program.h"

namespace tessera::plan {

/// Names of tensors, lists taken apart.
std::vector<std::string> tensor_names(const exported::Argument& argument);
std::vector<std::string> names_read(const exported::Node& node);
std::vector<std::string> names_given(const exported::Node& node);

/// By name: the number of the last node that reads it; the number of nodes if
/// the graph returns it.
using LastReads = std::map<std::string, size_t>;
LastReads last_reads(const exported::Graph& graph);

/// Names of what operators change: in place, or as statistics of a batch.
std::set<std::string> names_changed(const exported::Graph& graph);
/// "relu_", but not "__and__".
bool writes_in_place(std::string_view operator_name);

/// Nodes of one call of a module: from `begin` up to `end`.
struct CallRange {
  std::string path;
  size_t begin = 0;
  size_t end = 0;
};

/// The calls of these modules. Throws PlanError if the nodes of a call do not
/// follow one another.
std::vector<CallRange> calls_of(
    const exported::Graph& graph,
    const std::set<std::string>& modules);

} // namespace tessera::plan
