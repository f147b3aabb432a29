#include "plan/activations/graph_walk.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "plan/activations/graph_run.h"
#include "plan/activations/recomputed_calls.h"

namespace tessera::plan {
namespace {

void add_leaves(
    const exported::TreeSpec& spec,
    const std::string& name,
    std::vector<std::string>& names) {
  if (spec.kind == exported::TreeSpec::Kind::Leaf) {
    names.push_back(name.empty() ? "0" : name);
  }
  for (size_t i = 0; i < spec.children.size(); ++i) {
    const std::string key =
        i < spec.keys.size() ? spec.keys[i] : std::to_string(i);
    add_leaves(spec.children[i], name.empty() ? key : name + "." + key, names);
  }
}

/// Python's names of the results: "logits", "0", "latent.1".
std::vector<std::string> result_names(const exported::Program& program) {
  std::vector<std::string> names;
  if (!program.module_calls.empty() && program.module_calls[0].outputs) {
    add_leaves(*program.module_calls[0].outputs, "", names);
  }
  return names;
}

class GraphWalk {
 public:
  GraphWalk(
      const exported::Program& program,
      const GraphSizes& sizes,
      const WalkOptions& options)
      : program_(program),
        options_(options),
        last_(last_reads(program.graph)),
        tape_(walk_.forward),
        run_(tape_, sizes, options.device),
        recomputed_(program.graph, last_, tape_, run_) {}

  Walk walk() && {
    Names names;
    bind_inputs(names);
    run_forward(names);
    const auto loss = make_loss(names);
    run_.let_go(names);
    tape_.keep_only_for(loss);
    const std::vector<GradNode> nodes = tape_.begin_part();
    walk_.unknown = run_.unknown();
    walk_.constant_bytes = run_.constant_bytes();
    tape_.begin(walk_.backward);
    if (loss) {
      tape_.add_gradient(*loss, tape_.heap.allocate(0));
    }
    tape_.run_backward(nodes);
    for (const ValueId input : inputs_) {
      tape_.heap.release(tape_.at(input).block);
    }
    add_ends_of_units();
    return std::move(walk_);
  }

 private:
  void run_forward(Names& names) {
    const exported::Graph& graph = program_.graph;
    size_t next = 0;
    for (const CallRange& call : calls_of(graph, options_.recomputed)) {
      run_.run(graph, next, call.begin, last_, names);
      recomputed_.run(call, names);
      next = call.end;
    }
    run_.run(graph, next, graph.nodes.size(), last_, names);
  }

  /// The value that a graph's input gets.
  Value input_value(const exported::InputSpec& spec, const std::string& name) {
    Value value{.shape = run_.shape_at(program_.graph, name)};
    if (const auto* param = std::get_if<exported::ParameterInput>(&spec)) {
      value.block = tape_.heap.outside();
      const auto place = options_.params.find(param->path);
      if (place != options_.params.end()) {
        value.seen = place->second;
        if (program_.graph.tensors.at(name).requires_grad) {
          value.param = place->second;
          value.needs_gradient = true;
        }
      }
    } else if (std::holds_alternative<exported::UserInput>(spec)) {
      value.block = tape_.heap.allocate(value.shape.bytes());
    } else {
      value.block = tape_.heap.outside();
      value.is_constant = std::holds_alternative<exported::ConstantInput>(spec);
      value.is_buffer = !value.is_constant;
    }
    return value;
  }

  void bind_inputs(Names& names) {
    for (size_t i = 0;
         i < program_.inputs.size() && i < program_.graph.inputs.size();
         ++i) {
      for (const std::string& name : tensor_names(program_.graph.inputs[i])) {
        const auto& spec = program_.inputs[i];
        const ValueId value = tape_.add(input_value(spec, name));
        run_.hold(names, name, value);
        if (std::holds_alternative<exported::UserInput>(spec)) {
          inputs_.push_back(value);
        } // else nobody frees it
      }
    }
  }

  struct Result {
    std::string name;
    ValueId value = 0;
  };
  /// The result that the loss is made of; nothing if none has a gradient.
  std::optional<Result> result_for_loss(const Names& names) const {
    std::optional<Result> first;
    const std::vector<std::string> python_names = result_names(program_);
    size_t number = 0; // of the next result
    for (size_t i = 0;
         i < program_.outputs.size() && i < program_.graph.outputs.size();
         ++i) {
      if (program_.outputs[i].kind != exported::OutputSpec::Kind::User) {
        continue;
      }
      const size_t place = number++;
      for (const std::string& name : tensor_names(program_.graph.outputs[i])) {
        const auto found = names.find(name);
        if (found == names.end() || !tape_.needs_gradient(found->second)) {
          continue;
        }
        const Result result{
            .name = place < python_names.size() ? python_names[place]
                                                : std::to_string(place),
            .value = found->second};
        if (tape_.at(result.value).shape.numel() == 1) {
          return result; // the loss itself
        }
        if (!first) {
          first = result;
        }
      }
    }
    return first;
  }

  /// A cross-entropy over the last dimension, unless a result is one number.
  std::optional<ValueId> make_loss(Names& names) {
    const auto result = result_for_loss(names);
    if (!result) {
      return std::nullopt;
    }
    walk_.loss = result->name;
    const TensorShape shape = tape_.at(result->value).shape;
    walk_.is_loss = shape.numel() == 1;
    if (walk_.is_loss) {
      return result->value;
    }
    const int64_t classes =
        shape.sizes.empty() ? 1 : std::max<int64_t>(shape.sizes.back(), 1);
    inputs_.push_back(make(
        shape_of({shape.numel() / classes}, format::DType::Int64))); // targets
    const TensorShape wide = shape_of(shape.sizes, options_.loss_dtype);
    const bool casts = shape.dtype != wide.dtype;
    const ValueId logits =
        casts ? make_from(result->value, wide, false) : result->value;
    const ValueId log_softmax = make_from(logits, wide, true);
    const ValueId loss = make(shape_of({}, wide.dtype));
    tape_.record(
        {.results = {loss},
         .inputs = {{log_softmax, Flow::Make}},
         .saved = {log_softmax}});
    inputs_.push_back(loss);
    inputs_.push_back(make(shape_of({}, wide.dtype))); // the sum of weights
    run_.let_go(names);
    tape_.heap.release(tape_.at(log_softmax).block);
    if (casts) {
      tape_.heap.release(tape_.at(logits).block);
    }
    return loss;
  }

  ValueId make(const TensorShape& shape) {
    return tape_.add(
        {.shape = shape, .block = tape_.heap.allocate(shape.bytes())});
  }
  ValueId make_from(ValueId value, const TensorShape& shape, bool is_saved) {
    const ValueId result = make(shape);
    GradNode node{
        .results = {result}, .inputs = {{value, Flow::Make}}, .saved = {}};
    if (is_saved) {
      node.saved.push_back(result);
    }
    tape_.record(std::move(node));
    return result;
  }

  /// Behind the last gradient of each unit.
  void add_ends_of_units() {
    std::map<size_t, size_t> ends; // by unit: the number of the event
    for (size_t i = 0; i < walk_.backward.size(); ++i) {
      if (walk_.backward[i].kind == StepEvent::Kind::Gradient) {
        ends[walk_.backward[i].unit] = i;
      }
    }
    StepEvents with_ends;
    for (size_t i = 0; i < walk_.backward.size(); ++i) {
      const StepEvent& event = walk_.backward[i];
      with_ends.push_back(event);
      if (event.kind == StepEvent::Kind::Gradient && ends[event.unit] == i) {
        with_ends.push_back(
            {.kind = StepEvent::Kind::FinishUnit, .unit = event.unit});
      }
    }
    walk_.backward = std::move(with_ends);
  }

  const exported::Program& program_;
  const WalkOptions& options_;
  const LastReads last_;
  Walk walk_;
  Tape tape_;
  GraphRun run_;
  RecomputedCalls recomputed_;
  std::vector<ValueId> inputs_; // and what else is held until backward ends
};

} // namespace

Walk walk_through(
    const exported::Program& program,
    const GraphSizes& sizes,
    const WalkOptions& options) {
  return GraphWalk(program, sizes, options).walk();
}

} // namespace tessera::plan
