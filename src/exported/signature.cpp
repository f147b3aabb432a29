#include "exported/signature.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "exported/operator_name.h"
#include "exported/overloaded.h"
#include "exported/pytree.h"

namespace tessera::exported {
namespace {

using c10::IValue;

TreeSpec leaves_spec(TreeSpec::Kind kind, size_t count) {
  TreeSpec spec;
  spec.kind = kind;
  spec.children.resize(count);
  return spec;
}

/// The tuple (args, kwargs) that a program without a spec of its inputs takes.
TreeSpec plain_inputs(size_t count) {
  TreeSpec keywords;
  keywords.kind = TreeSpec::Kind::Dict;
  TreeSpec both;
  both.kind = TreeSpec::Kind::Tuple;
  both.children = {leaves_spec(TreeSpec::Kind::Tuple, count), keywords};
  return both;
}

std::string name_of(const std::vector<std::string>& names, size_t index) {
  return index < names.size() ? names[index]
                              : fmt::format("argument {}", index);
}

size_t num_user_outputs(const Program& program) {
  return static_cast<size_t>(std::count_if(
      program.outputs.begin(), program.outputs.end(), [](const auto& output) {
        return output.kind == OutputSpec::Kind::User ||
            output.kind == OutputSpec::Kind::Loss;
      }));
}

} // namespace

Signature::Signature(const Program& program) {
  for (const InputSpec& input : program.inputs) {
    add_leaf(program, input);
  }
  const ModuleCall* root =
      program.module_calls.empty() ? nullptr : &program.module_calls.front();
  inputs_ = root != nullptr && root->inputs ? *root->inputs
                                            : plain_inputs(leaves_.size());
  const size_t results = num_user_outputs(program);
  outputs_ = root != nullptr && root->outputs
      ? *root->outputs
      : leaves_spec(TreeSpec::Kind::Tuple, results);
  if (root != nullptr) {
    input_names_ = root->input_names;
  }
  if (inputs_.children.size() != 2 ||
      inputs_.num_leaves() != static_cast<int64_t>(leaves_.size()) ||
      outputs_.num_leaves() != static_cast<int64_t>(results)) {
    throw RefusedSignature(
        "the form of the model's inputs or results does not fit its graph. Export the model again.");
  }
  name_leaves(program);
  read_extents(program);
  read_ranges(program);
  read_guards(program);
}

void Signature::add_leaf(const Program& program, const InputSpec& input) {
  const auto* written = std::get_if<WrittenInput>(&input);
  const auto* user = std::get_if<UserInput>(&input);
  if (written == nullptr && user == nullptr) {
    return;
  }
  Leaf leaf;
  leaf.kind = Leaf::Kind::Fixed;
  std::string name;
  if (written != nullptr) {
    std::visit(
        Overloaded{
            [](const None&) {}, [&](const auto& value) { leaf.fixed = value; }},
        written->value);
  } else {
    const auto number = [&]<class Number>(
                            const Symbolic<Number>& given, Leaf::Kind kind) {
      if (const auto* text = std::get_if<std::string>(&given.value)) {
        name = *text;
        leaf.kind = kind;
      } else {
        leaf.fixed = std::get<Number>(given.value);
      }
    };
    std::visit(
        Overloaded{
            [&](const TensorName& tensor) {
              name = tensor.name;
              leaf.kind = Leaf::Kind::Tensor;
              leaf.dtype = to_scalar_type(program.graph.tensors.at(name).dtype);
            },
            [&](const SymbolicInt& given) { number(given, Leaf::Kind::Int); },
            [&](const SymbolicFloat& given) {
              number(given, Leaf::Kind::Float);
            },
            [&](const SymbolicBool& given) { number(given, Leaf::Kind::Bool); },
            [&](int64_t value) { leaf.fixed = value; },
            [&](double value) { leaf.fixed = value; },
            [&](bool value) { leaf.fixed = value; },
            [&](const std::string& value) { leaf.fixed = value; },
            [&](const None&) {},
            [&](const auto&) {
              throw RefusedSignature(fmt::format(
                  "input {} of the program is of a kind that is not supported.",
                  leaves_.size()));
            }},
        user->argument.value);
  }
  if (!name.empty()) {
    by_graph_name_[name] = leaves_.size();
  }
  leaves_.push_back(std::move(leaf));
}

void Signature::name_leaves(const Program&) {
  std::vector<std::string> names;
  const TreeSpec& positional = inputs_.children[0];
  const TreeSpec& keyword = inputs_.children[1];
  for (size_t i = 0; i < positional.children.size(); ++i) {
    leaf_names(positional.children[i], name_of(input_names_, i), names);
  }
  for (size_t i = 0; i < keyword.children.size(); ++i) {
    leaf_names(keyword.children[i], keyword.keys.at(i), names);
  }
  for (size_t i = 0; i < leaves_.size(); ++i) {
    leaves_[i].name = names.at(i);
  }
}

std::vector<IValue> Signature::flatten(
    const ExportedArgs& args,
    std::optional<at::ScalarType> dtype) const {
  const TreeSpec& positional = inputs_.children[0];
  const TreeSpec& keyword = inputs_.children[1];
  const size_t num_positional = positional.children.size();
  const size_t count = num_positional + keyword.children.size();
  const auto name_at = [&](size_t i) {
    return i < num_positional ? name_of(input_names_, i)
                              : keyword.keys[i - num_positional];
  };
  std::vector<const ExportedValue*> given(count);
  if (args.positional().size() > count) {
    raise<c10::ValueError>(
        {.call = "forward"},
        fmt::format(
            "{} positional arguments were given, but the model takes {} arguments.",
            args.positional().size(),
            count));
  }
  const size_t num_in_order =
      std::min(args.positional().size(), num_positional);
  for (size_t i = 0; i < num_in_order; ++i) {
    given[i] = &args.positional()[i];
  }
  for (const auto& [name, value] : args.keyword()) {
    size_t at = 0;
    while (at < count && name_at(at) != name) {
      ++at;
    }
    if (at == count || given[at] != nullptr) {
      std::vector<std::string> names;
      for (size_t i = 0; i < count; ++i) {
        names.push_back('"' + name_at(i) + '"');
      }
      raise<c10::ValueError>(
          {.call = "forward"},
          at == count
              ? fmt::format(
                    "there is no input \"{}\"; the model was exported with {}.",
                    name,
                    names.empty() ? "none"
                                  : fmt::format("{}", fmt::join(names, ", ")))
              : fmt::format("the input \"{}\" was given twice.", name));
    }
    given[at] = &value;
  }
  if (args.positional().size() > num_positional) {
    given[only_keyword(args, given)] = &args.positional().back();
  }
  std::vector<IValue> values;
  for (size_t i = 0; i < count; ++i) {
    const TreeSpec& spec = i < num_positional
        ? positional.children[i]
        : keyword.children[i - num_positional];
    const size_t first = values.size();
    const auto num_leaves = static_cast<size_t>(spec.num_leaves());
    if (given[i] == nullptr) { // what was fixed may be left out
      for (size_t leaf = first; leaf < first + num_leaves; ++leaf) {
        if (leaves_[leaf].kind != Leaf::Kind::Fixed) {
          raise<c10::ValueError>(
              {.call = "forward"},
              fmt::format(
                  "the input \"{}\" is missing: {}.",
                  leaves_[leaf].name,
                  expected_shape(leaves_[leaf])));
        }
        values.push_back(leaves_[leaf].fixed);
      }
      continue;
    }
    std::vector<const ExportedValue*> found;
    flatten_value(spec, name_at(i), *given[i], found);
    for (size_t k = 0; k < found.size(); ++k) {
      const Leaf& leaf = leaves_[first + k];
      if (found[k]->size() > 0 ||
          found[k]->kind() >= ExportedValue::Kind::List) {
        raise<c10::TypeError>(
            {.call = "forward"},
            fmt::format(
                "the input \"{}\" is {}, but the model was exported with {}.",
                leaf.name,
                found[k]->describe(),
                expected_shape(leaf)));
      }
      values.push_back(to_ivalue(*found[k]));
      check_kind(leaf, values.back(), dtype);
    }
  }
  const std::vector<int64_t> symbols = solve(values);
  const FormulaValues known{.symbols = symbols, .inputs = values};
  for (const Check& guard : guards_) {
    if (!as_bool(guard.formula.evaluate(known))) {
      raise<c10::ValueError>(
          {.call = "forward"},
          fmt::format(
              "the inputs do not fulfil a condition of the exported program: {}. Export the model for such inputs.",
              guard.text));
    }
  }
  return values;
}

/// The keyword input that one positional argument too many can stand for: the
/// only one that is missing. The file does not tell in which order Python's
/// forward() takes several.
size_t Signature::only_keyword(
    const ExportedArgs& args,
    const std::vector<const ExportedValue*>& given) const {
  const size_t num_positional = inputs_.children[0].children.size();
  const TreeSpec& keyword = inputs_.children[1];
  auto first = leaves_.begin() + inputs_.children[0].num_leaves();
  std::vector<size_t> missing;
  std::vector<std::string> names;
  for (size_t i = 0; i < keyword.children.size(); ++i) {
    const auto end = first + keyword.children[i].num_leaves();
    const bool is_fixed = std::all_of(first, end, [](const Leaf& leaf) {
      return leaf.kind == Leaf::Kind::Fixed;
    });
    first = end;
    if (!is_fixed && given[num_positional + i] == nullptr) {
      missing.push_back(num_positional + i);
      names.push_back('"' + keyword.keys.at(i) + '"');
    }
  }
  if (args.positional().size() != num_positional + 1 || missing.size() != 1) {
    raise<c10::ValueError>(
        {.call = "forward"},
        fmt::format(
            "{} positional arguments were given, but the model was exported with {}{}. Give the other inputs by name: ExportedArgs().set(NAME, VALUE).",
            args.positional().size(),
            num_positional,
            names.empty()
                ? ""
                : fmt::format(
                      "; it takes {} by name", fmt::join(names, ", "))));
  }
  return missing.front();
}

ExportedValue Signature::unflatten(const std::vector<IValue>& results) const {
  size_t next = 0;
  return unflatten_value(outputs_, results, next);
}

} // namespace tessera::exported
