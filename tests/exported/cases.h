// Models that export_cases.py exports, with what Python makes of them.
#pragma once

#include <tessera/exported/exported.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/disk/python.h"
#include "support/ranks.h"

namespace tessera::testing {

/// For tests that need the cases.
class ExportedCases : public ::testing::Test {
 protected:
  void SetUp() override {
    if (checkpoint::python_with_torch().empty()) {
      GTEST_SKIP() << "this LibTorch came without Python";
    }
    torch::set_num_threads(1); // as Python had
  }
};

/// The folder with all cases. The first call of a test program exports them,
/// unless they are there already.
inline std::filesystem::path exported_cases() {
  std::filesystem::path path = TESSERA_EXPORTED_CASES;
  if (in_worker()) {
    return path;
  }
  static const auto outcome = checkpoint::run_python(
      checkpoint::python_with_torch(), TESSERA_EXPORT_CASES, {path});
  TORCH_CHECK(outcome.status == 0, outcome.output);
  return path;
}

/// What torch.save wrote.
inline c10::IValue read_python(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, path.string(), " cannot be read");
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  return torch::pickle_load(bytes);
}

inline ExportedValue to_exported(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor();
  }
  if (value.isBool()) {
    return value.toBool();
  }
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isDouble()) {
    return value.toDouble();
  }
  if (value.isString()) {
    return value.toStringRef();
  }
  if (value.isNone()) {
    return {};
  }
  if (value.isGenericDict()) {
    std::vector<ExportedValue::Item> items;
    for (const auto& item : value.toGenericDict()) {
      items.emplace_back(item.key().toStringRef(), to_exported(item.value()));
    }
    return ExportedValue::dict(std::move(items));
  }
  std::vector<ExportedValue> elements;
  if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) {
      elements.push_back(to_exported(element));
    }
    return ExportedValue::tuple(std::move(elements));
  }
  for (const auto& element : value.toListRef()) {
    elements.push_back(to_exported(element));
  }
  return ExportedValue::list(std::move(elements));
}

/// The reference of a case.
class Reference {
 public:
  explicit Reference(const std::string& name)
      : value_(to_exported(read_python(exported_cases() / (name + ".ref")))) {}

  const ExportedValue& operator[](const std::string& key) const {
    return value_[key];
  }
  ExportedArgs args() const {
    ExportedArgs result;
    for (size_t i = 0; i < value_["args"].size(); ++i) {
      result.add(value_["args"][i]);
    }
    if (value_.contains("kwargs")) {
      for (const std::string& key : value_["kwargs"].keys()) {
        result.set(key, value_["kwargs"][key]);
      }
    }
    return result;
  }

 private:
  ExportedValue value_;
};

inline std::filesystem::path exported_case(const std::string& name) {
  return exported_cases() / (name + ".pt2");
}

/// The single values of a result, in Python's order.
inline void leaves_of(
    const ExportedValue& value,
    std::vector<ExportedValue>& leaves) {
  if (value.kind() < ExportedValue::Kind::List) {
    leaves.push_back(value);
  }
  for (size_t i = 0; i < value.size(); ++i) {
    leaves_of(value[i], leaves);
  }
}

/// loss_of() of export_cases.py.
inline at::Tensor loss_of(const ExportedValue& result) {
  at::Tensor total = torch::zeros({}, torch::kDouble);
  for (const at::Tensor& tensor : result.tensors()) {
    if (tensor.is_floating_point()) {
      total = total + tensor.to(torch::kDouble).square().mean();
    }
  }
  return total;
}

} // namespace tessera::testing
