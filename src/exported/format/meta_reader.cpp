#include "exported/format/meta_reader.h"

#include <array>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace tessera::exported {
namespace {

template <class Enum>
using Codes = std::pair<int64_t, Enum>;

constexpr std::array<Codes<DType>, 21> kDTypeCodes{{
    {1, DType::UInt8},           {2, DType::Int8},
    {3, DType::Int16},           {4, DType::Int32},
    {5, DType::Int64},           {6, DType::Float16},
    {7, DType::Float32},         {8, DType::Float64},
    {9, DType::Complex32},       {10, DType::Complex64},
    {11, DType::Complex128},     {12, DType::Bool},
    {13, DType::BFloat16},       {28, DType::UInt16},
    {29, DType::Float8E4M3FN},   {30, DType::Float8E5M2},
    {31, DType::Float8E4M3FNUZ}, {32, DType::Float8E5M2FNUZ},
    {33, DType::Float8E8M0FNU},  {34, DType::UInt32},
    {35, DType::UInt64},
}};

constexpr std::array<Codes<Layout>, 7> kLayoutCodes{{
    {1, Layout::SparseCoo},
    {2, Layout::SparseCsr},
    {3, Layout::SparseCsc},
    {4, Layout::SparseBsr},
    {5, Layout::SparseBsc},
    {6, Layout::Mkldnn},
    {7, Layout::Strided},
}};

constexpr std::array<Codes<MemoryFormat>, 4> kMemoryFormatCodes{{
    {1, MemoryFormat::Contiguous},
    {2, MemoryFormat::ChannelsLast},
    {3, MemoryFormat::ChannelsLast3d},
    {4, MemoryFormat::Preserve},
}};

template <class Table>
auto read_code(const JsonAt& at, const Table& table, const char* what) {
  const int64_t code = at.integer();
  for (const auto& [known, meaning] : table) {
    if (known == code) {
      return meaning;
    }
  }
  at.refuse(
      "is " + std::to_string(code) + ", which is the code of no " + what +
      " that is known");
}

/// The value at export, "hint": a number of any kind.
template <class Number>
std::optional<Number> read_hint(const JsonAt& hint) {
  const auto& tag = hint.tag();
  if (tag == "as_int") {
    return static_cast<Number>(hint.tagged().integer());
  }
  if (tag == "as_bool") {
    return static_cast<Number>(hint.tagged().boolean());
  }
  if (tag == "as_float") {
    const double number = hint.tagged().number();
    return std::is_same_v<Number, double> ? std::optional<Number>(number)
                                          : std::nullopt;
  }
  hint.refuse_tag();
}

template <class Number, class Read>
Expression<Number> read_expression(
    const JsonAt& at,
    const char* written,
    const Read& read) {
  const auto& tag = at.tag();
  if (tag == "as_expr") {
    const JsonAt symbols = at.tagged();
    symbols.expect_only({"expr_str", "hint"});
    return {
        .value = symbols.at("expr_str").string(),
        .at_export = symbols.has("hint") ? read_hint<Number>(symbols.at("hint"))
                                         : std::nullopt};
  }
  if (tag == written) {
    return {.value = Number{read(at.tagged())}};
  }
  at.refuse_tag();
}

std::vector<Expression<int64_t>> read_int_expressions(const JsonAt& at) {
  std::vector<Expression<int64_t>> all;
  at.for_each_item(
      [&](const JsonAt& item) { all.push_back(read_int_expression(item)); });
  return all;
}

} // namespace

DType read_dtype(const JsonAt& at) {
  return read_code(at, kDTypeCodes, "dtype");
}

Layout read_layout(const JsonAt& at) {
  return read_code(at, kLayoutCodes, "layout");
}

MemoryFormat read_memory_format(const JsonAt& at) {
  return read_code(at, kMemoryFormatCodes, "memory format");
}

Device read_device(const JsonAt& at) {
  at.expect_only({"type", "index"});
  Device device{.type = at.at("type").string(), .index = std::nullopt};
  if (at.has("index")) {
    device.index = at.at("index").integer();
  }
  return device;
}

Expression<int64_t> read_int_expression(const JsonAt& at) {
  return read_expression<int64_t>(
      at, "as_int", [](const JsonAt& value) { return value.integer(); });
}

Expression<double> read_float_expression(const JsonAt& at) {
  return read_expression<double>(
      at, "as_float", [](const JsonAt& value) { return value.number(); });
}

Expression<bool> read_bool_expression(const JsonAt& at) {
  return read_expression<bool>(
      at, "as_bool", [](const JsonAt& value) { return value.boolean(); });
}

TensorMeta read_tensor_meta(const JsonAt& at) {
  at.expect_only(
      {"dtype",
       "sizes",
       "requires_grad",
       "device",
       "strides",
       "storage_offset",
       "layout"});
  TensorMeta meta{
      .dtype = read_dtype(at.at("dtype")),
      .sizes = read_int_expressions(at.at("sizes")),
      .strides = read_int_expressions(at.at("strides")),
      .storage_offset = read_int_expression(at.at("storage_offset")),
      .requires_grad = at.at("requires_grad").boolean(),
      .device = read_device(at.at("device")),
      .layout = read_layout(at.at("layout"))};
  if (meta.strides.size() != meta.sizes.size()) {
    at.fail(
        "has " + std::to_string(meta.sizes.size()) + " sizes and " +
        std::to_string(meta.strides.size()) + " strides");
  }
  return meta;
}

} // namespace tessera::exported
