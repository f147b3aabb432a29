// What Python's F.linear_cross_entropy gives; goldens.py writes it.
#include <tessera/nn/linear_cross_entropy.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "support/device.h"

namespace tessera {
namespace {

constexpr int64_t kGoldenTokens = 13;
constexpr int64_t kGoldenWidth = 6;
constexpr int64_t kGoldenClasses = 11;

struct Golden {
  std::string name;
  std::string dtype;
  std::string reduction;
  int64_t ignore_index = 0;
  double label_smoothing = 0;
  bool has_bias = false;
  bool has_class_weight = false;
  std::map<std::string, at::Tensor> results; // in double, flat
};

std::ostream& operator<<(std::ostream& out, const Golden& golden) {
  return out << golden.name;
}

at::Tensor numbers(std::istringstream& words) {
  std::vector<double> values;
  std::string word;
  while (words >> word) {
    values.push_back(std::stod(word)); // "nan" too
  }
  return torch::tensor(values, torch::kDouble);
}

std::vector<Golden> read_goldens() {
  std::ifstream file(TESSERA_NN_GOLDENS);
  std::vector<Golden> goldens;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "case") {
      Golden& golden = goldens.emplace_back();
      words >> golden.name >> golden.dtype >> golden.reduction >>
          golden.ignore_index >> golden.label_smoothing >> golden.has_bias >>
          golden.has_class_weight;
    } else if (what != "#") {
      goldens.back().results[what] = numbers(words);
    }
  }
  return goldens;
}

/// As in goldens.py.
at::Tensor pattern(int64_t count, int64_t factor, int64_t modulus) {
  return ((torch::arange(count, torch::kDouble) * factor).remainder(modulus) -
          modulus / 2) /
      8;
}

at::ScalarType dtype_of(const std::string& name) {
  return name == "float64" ? at::kDouble
      : name == "float32"  ? at::kFloat
                           : at::kBFloat16;
}

/// Python's chunked gradients in bfloat16 are rounded once more than ours.
double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : 8e-3;
}

void expect_near(
    const at::Tensor& found,
    const at::Tensor& golden,
    double tolerance,
    const std::string& what) {
  const auto flat = found.detach().to(at::kCPU, at::kDouble).flatten();
  ASSERT_EQ(flat.sizes(), golden.sizes()) << what;
  const double size = golden.nan_to_num().abs().max().item<double>();
  EXPECT_TRUE(torch::allclose(
      flat, golden, tolerance, tolerance * size, /*equal_nan=*/true))
      << what << ": " << (flat - golden).abs().max().item<double>()
      << " apart, the largest is " << size;
}

class LinearCrossEntropyGoldenTest : public ::testing::TestWithParam<Golden> {};

TEST_P(LinearCrossEntropyGoldenTest, ProducesPyTorchValues) {
  const Golden& golden = GetParam();
  const at::ScalarType dtype = dtype_of(golden.dtype);
  const at::Device device = testing::test_device();
  const auto leaf = [&](const at::Tensor& values) {
    return values.to(device, dtype).requires_grad_();
  };
  const auto hidden = leaf(pattern(kGoldenTokens * kGoldenWidth, 7, 23)
                               .view({kGoldenTokens, kGoldenWidth}));
  const auto weight = leaf(pattern(kGoldenClasses * kGoldenWidth, 5, 19)
                               .view({kGoldenClasses, kGoldenWidth}));
  const auto bias = leaf(pattern(kGoldenClasses, 3, 7));
  auto targets =
      (torch::arange(kGoldenTokens, device) * 4).remainder(kGoldenClasses);
  if (golden.name == "all_ignored") {
    targets.fill_(golden.ignore_index);
  }
  LinearCrossEntropyOptions options;
  options.ignore_index(golden.ignore_index)
      .label_smoothing(golden.label_smoothing)
      .batch_chunk_size(5);
  if (golden.reduction == "sum") {
    options.reduction(torch::kSum);
  } else if (golden.reduction == "none") {
    options.reduction(torch::kNone);
  }
  if (golden.has_bias) {
    options.linear_bias(bias);
  }
  if (golden.has_class_weight) {
    options.weight(
        (pattern(kGoldenClasses, 5, 13).abs() + 0.5).to(device, dtype));
  }
  const auto loss = linear_cross_entropy(hidden, weight, targets, options);
  loss.backward((golden.reduction == "none" ? pattern(kGoldenTokens, 3, 11)
                                            : torch::tensor(1.5))
                    .to(loss.options()));

  const double tolerance = tolerance_of(dtype);
  expect_near(loss, golden.results.at("loss"), tolerance, "loss");
  expect_near(hidden.grad(), golden.results.at("hidden"), tolerance, "hidden");
  expect_near(weight.grad(), golden.results.at("weight"), tolerance, "weight");
  if (golden.has_bias) {
    expect_near(bias.grad(), golden.results.at("bias"), tolerance, "bias");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Python,
    LinearCrossEntropyGoldenTest,
    ::testing::ValuesIn(read_goldens()),
    [](const auto& test) { return test.param.name; });

TEST(LinearCrossEntropyGoldenFileTest, HasEveryCase) {
  EXPECT_EQ(read_goldens().size(), 17u);
}

} // namespace
} // namespace tessera
