#include <algorithm>
#include <iterator>
#include <string>
#include <unordered_map>

#include "exported/python_functions.h"
#include "exported/python_math.h"

namespace tessera::exported {
namespace {

using Table = std::unordered_map<std::string_view, PythonFunction>;

PythonFunction find_in(const Table& table, std::string_view name) {
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

} // namespace

PythonFunction find_node_function(std::string_view target) {
  using namespace python; // NOLINT: a table of them
  static const Table table{
      {"_operator.add", add},
      {"_operator.sub", sub},
      {"_operator.mul", mul},
      {"_operator.truediv", true_div},
      {"_operator.floordiv", floor_div},
      {"_operator.mod", mod},
      {"_operator.pow", power},
      {"_operator.neg", neg},
      {"_operator.pos", pos},
      {"_operator.eq", equal},
      {"_operator.ne", not_equal},
      {"_operator.lt", less},
      {"_operator.le", less_equal},
      {"_operator.gt", greater},
      {"_operator.ge", greater_equal},
      {"_operator.and_", logical_and},
      {"_operator.or_", logical_or},
      {"_operator.lshift", shift_left},
      {"_operator.rshift", shift_right},
      {"_operator.abs", absolute},
      {"_operator.not_", logical_not},
      {"math.trunc", trunc_to_int},
      {"math.ceil", ceil_to_int},
      {"math.floor", floor_to_int},
      {"math.sqrt", square_root},
      {"builtins.max", maximum},
      {"builtins.min", minimum},
      {"builtins.round", round_to_int},
      {"torch.sym_int", trunc_to_int},
      {"torch.sym_float", to_float},
      {"torch.sym_not", logical_not},
      {"torch.sym_max", sym_maximum},
      {"torch.sym_min", sym_minimum},
      {"torch.sym_ite", choose},
      {"torch.sym_sqrt", square_root},
      {"torch._sym_sqrt", square_root},
      {"torch.ops.aten.sym_size.int", sym_size},
      {"torch.ops.aten.sym_size.default", sym_sizes},
      {"torch.ops.aten.sym_stride.int", sym_stride},
      {"torch.ops.aten.sym_numel.default", sym_numel},
      {"torch.ops.aten.sym_storage_offset.default", sym_storage_offset}};
  // The functions of `torch` are written with the module that has them.
  const size_t last = target.rfind('.');
  if (target.starts_with("torch.") && !target.starts_with("torch.ops.")) {
    return find_in(table, "torch" + std::string(target.substr(last)));
  }
  return find_in(
      table,
      target.starts_with("operator.") ? "_" + std::string(target)
                                      : std::string(target));
}

size_t num_operands(std::string_view target) {
  using namespace python; // NOLINT: a list of them
  static constexpr PythonFunction kUnary[] = {
      neg,
      pos,
      absolute,
      logical_not,
      trunc_to_int,
      ceil_to_int,
      floor_to_int,
      round_to_int,
      to_float,
      square_root,
      sym_sizes,
      sym_numel,
      sym_storage_offset};
  const PythonFunction function = find_node_function(target);
  const bool is_unary =
      std::find(std::begin(kUnary), std::end(kUnary), function) !=
      std::end(kUnary);
  return is_unary ? 1 : function == choose ? 3 : 2;
}

PythonFunction find_formula_function(std::string_view name) {
  using namespace python; // NOLINT: a table of them
  static const Table table{
      {"Add", add},
      {"Mul", mul},
      {"Pow", power},
      {"PowByNatural", power},
      {"FloatPow", power},
      {"Mod", mod},
      {"PythonMod", mod},
      {"FloorDiv", floor_div},
      {"CleanDiv", floor_div},
      {"ModularIndexing", modular_indexing},
      {"IntTrueDiv", true_div},
      {"FloatTrueDiv", true_div},
      {"Max", maximum},
      {"Min", minimum},
      {"max", maximum},
      {"min", minimum},
      {"Abs", absolute},
      {"abs", absolute},
      {"ToFloat", to_float},
      {"float", to_float},
      {"int", trunc_to_int},
      {"FloorToInt", floor_to_int},
      {"CeilToInt", ceil_to_int},
      {"TruncToInt", trunc_to_int},
      {"RoundToInt", round_to_int},
      {"floor", floor_to_int},
      {"ceiling", ceil_to_int},
      {"math.floor", floor_to_int},
      {"math.ceil", ceil_to_int},
      {"math.trunc", trunc_to_int},
      {"math.sqrt", square_root},
      {"OpaqueUnaryFn_sqrt", square_root},
      {"Identity", same},
      {"Where", choose},
      {"LShift", shift_left},
      {"RShift", shift_right},
      {"Equality", equal},
      {"Eq", equal},
      {"Unequality", not_equal},
      {"Ne", not_equal},
      {"LessThan", less_equal},
      {"Le", less_equal},
      {"StrictLessThan", less},
      {"Lt", less},
      {"GreaterThan", greater_equal},
      {"Ge", greater_equal},
      {"StrictGreaterThan", greater},
      {"Gt", greater},
      {"And", logical_and},
      {"Or", logical_or},
      {"Not", logical_not},
      {"+", add},
      {"-", sub},
      {"*", mul},
      {"/", true_div},
      {"//", floor_div},
      {"%", mod},
      {"**", power},
      {"neg", neg},
      {"==", equal},
      {"!=", not_equal},
      {"<", less},
      {"<=", less_equal},
      {">", greater},
      {">=", greater_equal},
      {"and", logical_and},
      {"or", logical_or},
      {"not", logical_not},
      {"&", logical_and},
      {"|", logical_or}};
  return find_in(table, name);
}

} // namespace tessera::exported
