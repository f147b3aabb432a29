// Calls of modules that backward runs again.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exported/format/program.h"
#include "plan/activations/graph_run.h"

namespace tessera::plan {

/// As tessera::recompute() runs a part: with a graph, which is then freed;
/// inputs and results stay. Backward runs the part again, and backward through
/// it, while it holds the gradients of the results.
class RecomputedCalls {
 public:
  /// All must outlive it, and it the tape's nodes.
  RecomputedCalls(
      const exported::Graph& graph,
      const LastReads& last,
      Tape& tape,
      GraphRun& run)
      : graph_(graph),
        last_(last),
        tape_(tape),
        run_(run),
        changed_(names_changed(graph)) {}

  void run(const CallRange& call, Names& names);

 private:
  using NamedValues = std::vector<std::pair<std::string, ValueId>>;
  struct Part {
    CallRange call;
    NamedValues inputs;
    NamedValues outputs; // those that need gradients
    int64_t state_bytes = 0; // that the second run must find as it was
  };
  /// What stands for an input inside the part.
  struct Cut {
    ValueId outside;
    ValueId inside;
  };

  std::shared_ptr<Part> part_of(const CallRange& call, const Names& names)
      const;
  std::vector<Cut> run_cut(const Part& part, Names& inside);
  void record(
      const std::shared_ptr<Part>& part,
      ValueId state,
      const Names& inside,
      Names& names);
  void run_backward(const Part& part);
  ValueId add_state(const Part& part);

  const exported::Graph& graph_;
  const LastReads& last_;
  Tape& tape_;
  GraphRun& run_;
  const std::set<std::string> changed_;
};

} // namespace tessera::plan
