#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "exported/node_text.h"
#include "exported/overloaded.h"
#include "exported/python_functions.h"
#include "exported/pytree.h"
#include "exported/signature.h"

namespace tessera::exported {
namespace {

using c10::IValue;

[[noreturn]] void refuse_formula(
    const std::string& text,
    const UnknownFormula& why) {
  throw RefusedSignature(fmt::format(
      "the expression \"{}\" is not understood: {}.", text, why.what()));
}

std::string range_text(const Range& range) {
  if (!range.max) {
    return fmt::format("{} or more", range.min.value_or(0));
  }
  return fmt::format("{} to {}", range.min.value_or(0), *range.max);
}

bool is_within(const Range& range, int64_t value) {
  return value >= range.min.value_or(value) &&
      value <= range.max.value_or(value);
}

} // namespace

size_t Signature::symbol(const std::string& name) {
  for (size_t i = 0; i < symbols_.size(); ++i) {
    if (symbols_[i].name == name) {
      return i;
    }
  }
  symbols_.push_back({name, {}, ""});
  return symbols_.size() - 1;
}

Extent Signature::extent(const std::variant<std::string, int64_t>& written) {
  Extent result;
  if (const auto* size = std::get_if<int64_t>(&written)) {
    result.size = *size;
    return result;
  }
  result.text = std::get<std::string>(written);
  try {
    result.formula = Formula::parse(
        result.text,
        {.symbol =
             [&](const std::string& name) {
               return std::optional(symbol(name));
             },
         .input = {}});
  } catch (const UnknownFormula& why) {
    refuse_formula(result.text, why);
  }
  result.linear = result.formula->linear();
  return result;
}

void Signature::read_extents(const Program& program) {
  const Graph& graph = program.graph;
  for (const auto& [name, index] : by_graph_name_) {
    Leaf& leaf = leaves_[index];
    if (leaf.kind == Leaf::Kind::Tensor) {
      for (const auto& size : graph.tensors.at(name).sizes) {
        leaf.sizes.push_back(extent(size.value));
      }
    } else if (leaf.kind == Leaf::Kind::Int && graph.ints.contains(name)) {
      leaf.sizes.push_back(extent(graph.ints.at(name).value));
    }
  }
  // Each symbol needs an input that tells its value.
  for (const Leaf& leaf : leaves_) {
    for (const Extent& extent : leaf.sizes) {
      const auto& linear = extent.linear;
      if (linear && symbols_[linear->symbol].input.empty()) {
        symbols_[linear->symbol].input = leaf.name;
      }
    }
  }
  for (const Symbol& each : symbols_) {
    if (each.input.empty()) {
      throw RefusedSignature(fmt::format(
          "no input tells the value of the size \"{}\".", each.name));
    }
  }
}

void Signature::read_ranges(const Program& program) {
  for (const auto& entry : program.ranges) {
    const std::string& text = entry.first;
    const auto& range = entry.second;
    const auto named =
        std::find_if(symbols_.begin(), symbols_.end(), [&](const auto& each) {
          return each.name == text;
        });
    if (named != symbols_.end()) {
      named->range = range;
      continue;
    }
    // A formula of symbols follows from theirs, unless it says more. Ranges of
    // values that the graph computes are checked by nodes of the graph.
    bool is_of_inputs = true;
    const auto find = [&](const std::string& name) -> std::optional<size_t> {
      for (size_t i = 0; i < symbols_.size(); ++i) {
        if (symbols_[i].name == name) {
          return i;
        }
      }
      is_of_inputs = false;
      return std::nullopt;
    };
    try {
      const Formula formula =
          Formula::parse(text, {.symbol = find, .input = {}});
      const auto bound = [&](std::optional<int64_t> limit, const char* sign) {
        if (limit) {
          const std::string condition =
              fmt::format("({}) {} {}", text, sign, *limit);
          ranges_.push_back(
              {Formula::parse(condition, {.symbol = find, .input = {}}),
               condition});
        }
      };
      bound(range.min, ">=");
      bound(range.max, "<=");
    } catch (const UnknownFormula& why) {
      if (is_of_inputs) {
        refuse_formula(text, why);
      }
    }
  }
}

/// The input that a guard names. Python's forward(*args, **kwargs) has
/// `args[0]` and `kwargs['x']`, which are `args_0` and `x` here, and an export
/// with strict=True numbers all of them: `flat_args[0]`.
std::optional<size_t> Signature::guarded_leaf(const std::string& path) const {
  const auto find = [&](const std::string& name) -> std::optional<size_t> {
    for (size_t i = 0; i < leaves_.size(); ++i) {
      if (leaves_[i].name == name) {
        return i;
      }
    }
    return std::nullopt;
  };
  if (const auto found = find(path)) {
    return found;
  }
  const size_t open = path.find('[');
  const size_t close = path.find(']', open);
  if (open == path.npos || close == path.npos) {
    return std::nullopt;
  }
  const std::string name = path.substr(0, open);
  const std::string key = path.substr(open + 1, close - open - 1);
  const std::string rest = path.substr(close + 1);
  if (key.starts_with('\'')) {
    return find(key.substr(1, key.size() - 2) + rest);
  }
  size_t number = 0;
  const auto [end, error] =
      std::from_chars(key.data(), key.data() + key.size(), number);
  if (name == "flat_args" && rest.empty() && error == std::errc() &&
      end == key.data() + key.size() && number < leaves_.size()) {
    return number;
  }
  return find(name + "_" + key + rest);
}

void Signature::read_guards(const Program& program) {
  const FormulaNames names{
      .symbol = [&](const std::string& name) -> std::optional<size_t> {
        for (size_t i = 0; i < symbols_.size(); ++i) {
          if (symbols_[i].name == name) {
            return i;
          }
        }
        return std::nullopt;
      },
      .input = [&](const std::string& path) { return guarded_leaf(path); }};
  for (const std::string& text : program.guards) {
    try {
      guards_.push_back({Formula::parse(text, names), text});
    } catch (const UnknownFormula& why) {
      refuse_formula(text, why);
    }
  }
}

std::string Signature::expected(const Extent& extent) const {
  if (!extent.formula) {
    return std::to_string(extent.size);
  }
  const auto& linear = extent.linear;
  if (!linear) {
    return extent.text;
  }
  const Symbol& of = symbols_[linear->symbol];
  if (linear->factor == 1 && linear->offset == 0) {
    return fmt::format("{} ({})", of.name, range_text(of.range));
  }
  return fmt::format(
      "{}{}{}{}",
      linear->factor == 1 ? "" : std::to_string(linear->factor) + "*",
      of.name,
      linear->offset > 0 ? "+" : "",
      linear->offset == 0 ? "" : std::to_string(linear->offset));
}

std::string Signature::expected_shape(const Leaf& leaf) const {
  switch (leaf.kind) {
    case Leaf::Kind::Tensor:
      break;
    case Leaf::Kind::Int:
      return leaf.sizes.empty()
          ? "an int"
          : fmt::format("an int, {}", expected(leaf.sizes.front()));
    case Leaf::Kind::Float:
      return "a float";
    case Leaf::Kind::Bool:
      return "a bool";
    case Leaf::Kind::Fixed:
      return to_value(leaf.fixed).describe();
  }
  std::vector<std::string> sizes;
  for (const Extent& size : leaf.sizes) {
    sizes.push_back(expected(size));
  }
  return fmt::format(
      "{} tensor of shape [{}]",
      dtype_text(leaf.dtype),
      fmt::join(sizes, ", "));
}

void Signature::check_kind(
    const Leaf& leaf,
    const IValue& value,
    std::optional<at::ScalarType> dtype) const {
  const auto refuse = [&](std::string_view what) {
    raise<c10::TypeError>(
        {.call = "forward"},
        fmt::format(
            "the input \"{}\" is {}, but the model was exported with {}.{}",
            leaf.name,
            to_value(value).describe(),
            expected_shape(leaf),
            what));
  };
  switch (leaf.kind) {
    case Leaf::Kind::Tensor: {
      if (!value.isTensor()) {
        refuse("");
      }
      const at::Tensor& tensor = value.toTensor();
      const bool is_converted = dtype && c10::isFloatingType(leaf.dtype) &&
          tensor.scalar_type() == *dtype;
      if (tensor.scalar_type() != leaf.dtype && !is_converted) {
        refuse(" Convert it with to(), or export the model for this dtype.");
      }
      if (tensor.dim() != static_cast<int64_t>(leaf.sizes.size())) {
        refuse("");
      }
      return;
    }
    case Leaf::Kind::Int:
      return value.isInt() ? void() : refuse("");
    case Leaf::Kind::Float:
      return value.isDouble() || value.isInt() ? void() : refuse("");
    case Leaf::Kind::Bool:
      return value.isBool() ? void() : refuse("");
    case Leaf::Kind::Fixed:
      if (!python_equal(value, leaf.fixed)) {
        refuse(
            " This value is part of the program: export the model again for another one.");
      }
      return;
  }
}

std::vector<int64_t> Signature::solve(const std::vector<IValue>& values) const {
  std::vector<int64_t> symbols(symbols_.size());
  std::vector<bool> known(symbols_.size());
  const auto refuse = [&](size_t leaf, const std::string& why) {
    raise<c10::ValueError>(
        {.call = "forward"},
        fmt::format(
            "the input \"{}\" is {}, but the model was exported with {}.{}",
            leaves_[leaf].name,
            to_value(values[leaf]).describe(),
            expected_shape(leaves_[leaf]),
            why));
  };
  const auto each_extent = [&](const auto& use) {
    for (size_t leaf = 0; leaf < leaves_.size(); ++leaf) {
      const auto& sizes = leaves_[leaf].sizes;
      for (size_t dim = 0; dim < sizes.size(); ++dim) {
        const int64_t size = values[leaf].isTensor()
            ? values[leaf].toTensor().size(static_cast<int64_t>(dim))
            : values[leaf].toInt();
        use(leaf, sizes[dim], size);
      }
    }
  };
  each_extent([&](size_t leaf, const Extent& extent, int64_t size) {
    if (!extent.formula) {
      if (size != extent.size) {
        refuse(leaf, "");
      }
      return;
    }
    const auto& linear = extent.linear;
    if (!linear || known[linear->symbol]) {
      return;
    }
    const int64_t rest = checked_sub(size, linear->offset);
    // By Python's functions: the quotient of the least int and -1 overflows.
    const c10::IValue both[] = {rest, linear->factor};
    if (python::mod(both).toInt() != 0) {
      refuse(leaf, "");
    }
    symbols[linear->symbol] = python::floor_div(both).toInt();
    known[linear->symbol] = true;
    if (!is_within(symbols_[linear->symbol].range, symbols[linear->symbol])) {
      refuse(leaf, "");
    }
  });
  const FormulaValues found{.symbols = symbols, .inputs = values};
  each_extent([&](size_t leaf, const Extent& extent, int64_t size) {
    if (!extent.formula) {
      return;
    }
    const int64_t wanted = extent.formula->evaluate(found).toInt();
    if (wanted != size) {
      refuse(
          leaf,
          fmt::format(
              " With the other inputs, {} is {} here.",
              expected(extent),
              wanted));
    }
  });
  for (const Check& range : ranges_) {
    if (!as_bool(range.formula.evaluate(found))) {
      raise<c10::ValueError>(
          {.call = "forward"},
          fmt::format(
              "the inputs are outside the exported range: {}.", range.text));
    }
  }
  return symbols;
}

} // namespace tessera::exported
