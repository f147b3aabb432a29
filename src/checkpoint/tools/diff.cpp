#include "checkpoint/tools/diff.h"

#include <nlohmann/json.hpp>

#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>

#include "checkpoint/format/dtype.h"
#include "checkpoint/tools/checkpoint_text.h"
#include "checkpoint/tools/compare_elements.h"
#include "checkpoint/tools/json_text.h"
#include "checkpoint/tools/name_filter.h"
#include "checkpoint/tools/tensor_reader.h"

namespace tessera::checkpoint {
namespace {

std::string number_text(double number) {
  std::array<char, 40> text;
  std::snprintf(text.data(), text.size(), "%.3g", number);
  return text.data();
}

std::string shape_text(const StoredTensor& tensor) {
  return std::string(format::info(tensor.dtype).torch_name) + " " +
      sizes_text(tensor.sizes);
}

std::string index_text(int64_t flat, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> index(sizes.size());
  for (size_t dim = sizes.size(); dim-- > 0;) {
    index[dim] = flat % sizes[dim];
    flat /= sizes[dim];
  }
  return sizes_text(index);
}

bool are_nan(const format::Value& a, const format::Value& b) {
  const auto* left = a.get<double>();
  const auto* right = b.get<double>();
  return left && right && std::isnan(*left) && std::isnan(*right);
}

class Differ {
 public:
  Differ(
      const Source& a,
      const Source& b,
      const DiffOptions& options,
      ProgressMeter& progress)
      : a_(a),
        b_(b),
        exclude_(options.exclude),
        reader_a_(a),
        reader_b_(b),
        progress_(progress) {
    tolerance_.equal_nan = options.equal_nan;
    tolerance_.is_exact = !options.rtol && !options.atol;
    tolerance_.rtol = options.rtol.value_or(0);
    tolerance_.atol = options.atol.value_or(0);
  }

  DiffReport run() {
    uint64_t total = 0;
    for (const auto& tensor : a_.tensors()) {
      total += is_excluded(tensor.name) ? 0 : tensor.bytes();
    }
    progress_.begin(total);
    for (const auto& tensor : a_.tensors()) {
      if (!leave_out(tensor.name)) {
        compare_tensor(tensor);
      }
    }
    for (const auto& value : a_.values()) {
      if (!leave_out(value.name)) {
        compare_value(value);
      }
    }
    report_missing(b_.tensors());
    report_missing(b_.values());
    return std::move(report_);
  }

 private:
  void differs(const std::string& name, const std::string& how) {
    report_.differences.push_back(
        {.name = name, .text = how, .elements = std::nullopt});
  }

  bool is_excluded(const std::string& name) const {
    return begins_with_any(name, exclude_);
  }

  bool leave_out(const std::string& name) {
    const bool is_out = is_excluded(name);
    report_.num_excluded += is_out ? 1 : 0;
    return is_out;
  }

  template <class Entries>
  void report_missing(const Entries& entries) {
    for (const auto& entry : entries) {
      if (!a_.find_tensor(entry.name) && !a_.find_value(entry.name) &&
          !leave_out(entry.name)) {
        differs(entry.name, "only in the second");
      }
    }
  }

  void compare_tensor(const StoredTensor& a) {
    const StoredTensor* b = b_.find_tensor(a.name);
    if (!b) {
      differs(
          a.name,
          b_.find_value(a.name) ? "a tensor in the first, none in the second"
                                : "only in the first");
      progress_.add(a.bytes());
      return;
    }
    if (a.sizes != b->sizes || (tolerance_.is_exact && a.dtype != b->dtype)) {
      differs(a.name, shape_text(a) + " against " + shape_text(*b));
      progress_.add(a.bytes());
      return;
    }
    compare_elements(a, *b);
  }

  void compare_elements(const StoredTensor& a, const StoredTensor& b) {
    ElementComparison found(a.dtype, b.dtype, tolerance_);
    reader_a_.each_piece(
        a,
        whole_of(a.sizes),
        [&](format::ByteSpan piece, const TensorBox& region) {
          found.add(piece, reader_b_.read(b, region));
          progress_.add(piece.size());
        });
    if (found.num_different() == 0) {
      ++report_.num_same;
      return;
    }
    std::string text = count_text(static_cast<double>(found.num_different())) +
        " of " + count_text(static_cast<uint64_t>(a.numel()), "element") +
        " differ, max abs " + number_text(found.max_abs()) + ", max rel " +
        number_text(found.max_rel());
    for (const auto& element : found.first()) {
      text += "\n    at " + index_text(element.index, a.sizes) + ": " +
          element.a + " against " + element.b;
    }
    differs(a.name, text);
    report_.differences.back().elements = Difference::Elements{
        .num_different = found.num_different(),
        .num_all = a.numel(),
        .max_abs = found.max_abs(),
        .max_rel = found.max_rel()};
  }

  void compare_value(const StoredValue& a) {
    const StoredValue* b = b_.find_value(a.name);
    if (!b) {
      differs(
          a.name,
          b_.find_tensor(a.name) ? "no tensor in the first, one in the second"
                                 : "only in the first");
      return;
    }
    const format::Value value_a = a_.value(a);
    const format::Value value_b = b_.value(*b);
    if (value_a == value_b ||
        (tolerance_.equal_nan && are_nan(value_a, value_b))) {
      ++report_.num_same;
    } else {
      differs(a.name, value_text(value_a) + " against " + value_text(value_b));
    }
  }

  const Source& a_;
  const Source& b_;
  const std::vector<std::string> exclude_;
  TensorReader reader_a_;
  TensorReader reader_b_;
  ProgressMeter& progress_;
  Tolerance tolerance_;
  DiffReport report_;
};

} // namespace

std::string diff_json(const DiffReport& report) {
  nlohmann::ordered_json differences = nlohmann::ordered_json::array();
  for (const auto& difference : report.differences) {
    nlohmann::ordered_json item{
        {"name", difference.name}, {"text", difference.text}};
    if (difference.elements) {
      item["num_different"] = difference.elements->num_different;
      item["num_elements"] = difference.elements->num_all;
      item["max_abs"] = difference.elements->max_abs; // null for NaN
      item["max_rel"] = difference.elements->max_rel;
    }
    differences.push_back(std::move(item));
  }
  const nlohmann::ordered_json json{
      {"same", report.num_same},
      {"different", report.differences.size()},
      {"excluded", report.num_excluded},
      {"differences", std::move(differences)}};
  return json_text(json);
}

DiffReport diff(
    const Source& a,
    const Source& b,
    const DiffOptions& options,
    ProgressMeter& progress) {
  return Differ(a, b, options, progress).run();
}

} // namespace tessera::checkpoint
