// What forward() of a program takes and returns.
#pragma once

#include <tessera/exported/value.h>

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "exported/format/program.h"
#include "exported/formula.h"

namespace tessera::exported {

/// A size of an input, or a number that is an input: fixed or symbolic.
struct Extent {
  int64_t size = 0; // if there is no formula
  std::optional<Formula> formula;
  std::optional<Formula::Linear> linear; // if the formula is that simple
  std::string text; // of the formula
};

/// One value that the arguments of forward() are made of.
struct Leaf {
  enum class Kind : uint8_t { Tensor, Int, Float, Bool, Fixed };
  Kind kind = Kind::Tensor;
  std::string name; // `x`, `batch['ids']`
  c10::ScalarType dtype = c10::ScalarType::Undefined; // of a Tensor
  std::vector<Extent> sizes; // of a Tensor; one for an Int
  c10::IValue fixed; // the value that it had at export
};

/// Inputs that cannot be checked; what() is a sentence.
struct RefusedSignature : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Checks arguments against what was exported and takes them apart; puts
/// results together.
class Signature {
 public:
  /// Throws RefusedSignature if a range or a guard is not understood.
  explicit Signature(const Program& program);

  /// One value for each leaf. Floating tensors may have `dtype` in place of
  /// the exported one. Throws c10::ValueError, or c10::TypeError for a value of
  /// another kind or dtype, that names the input, what was expected and what
  /// was given.
  std::vector<c10::IValue> flatten(
      const ExportedArgs& args,
      std::optional<at::ScalarType> dtype) const;
  /// The value that Python's forward() would return.
  ExportedValue unflatten(const std::vector<c10::IValue>& results) const;

  const std::vector<Leaf>& leaves() const {
    return leaves_;
  }
  const TreeSpec& outputs() const {
    return outputs_;
  }
  size_t leaf_at(const std::string& graph_name) const {
    return by_graph_name_.at(graph_name);
  }

 private:
  struct Symbol {
    std::string name;
    Range range;
    std::string input; // that tells its value
  };
  struct Check { // must be true
    Formula formula;
    std::string text;
  };

  void add_leaf(const Program& program, const InputSpec& input);
  void name_leaves(const Program& program);
  void read_extents(const Program& program);
  Extent extent(const std::variant<std::string, int64_t>& written);
  void read_ranges(const Program& program);
  void read_guards(const Program& program);
  size_t symbol(const std::string& name);

  size_t only_keyword(
      const ExportedArgs& args,
      const std::vector<const ExportedValue*>& given) const;
  std::optional<size_t> guarded_leaf(const std::string& path) const;
  std::vector<int64_t> solve(const std::vector<c10::IValue>& values) const;
  void check_kind(
      const Leaf& leaf,
      const c10::IValue& value,
      std::optional<at::ScalarType> dtype) const;
  std::string expected_shape(const Leaf& leaf) const;
  std::string expected(const Extent& extent) const;

  TreeSpec inputs_;
  TreeSpec outputs_;
  std::vector<std::string> input_names_;
  std::vector<Leaf> leaves_;
  std::unordered_map<std::string, size_t> by_graph_name_;
  std::vector<Symbol> symbols_;
  std::vector<Check> ranges_; // of formulas
  std::vector<Check> guards_;
};

} // namespace tessera::exported
