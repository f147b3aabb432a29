// What Python's GradScaler does; scaler_goldens.py writes it.
#include <tessera/optim/sgd.h>
#include <tessera/train/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>

#include "support/device.h"

namespace tessera {
namespace {

struct Golden {
  std::string name;
  GradScalerOptions options;
  struct Step {
    std::string kinds[2];
    std::optional<double> new_scale;
    double scale = 0;
    int64_t tracker = 0;
    std::vector<double> params;
  };
  std::vector<Step> steps;
};

std::ostream& operator<<(std::ostream& out, const Golden& golden) {
  return out << golden.name;
}

std::vector<Golden> read_scaler_goldens() {
  std::ifstream file(TESSERA_SCALER_GOLDENS);
  std::vector<Golden> goldens;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "case") {
      Golden& golden = goldens.emplace_back();
      double scale = 0;
      double growth = 0;
      double backoff = 0;
      int64_t interval = 0;
      words >> golden.name >> scale >> growth >> backoff >> interval;
      golden.options.init_scale(scale)
          .growth_factor(growth)
          .backoff_factor(backoff)
          .growth_interval(interval);
    } else if (what == "step") {
      auto& step = goldens.back().steps.emplace_back();
      std::string new_scale;
      words >> step.kinds[0] >> step.kinds[1] >> new_scale >> step.scale >>
          step.tracker;
      if (new_scale != "-") {
        step.new_scale = std::stod(new_scale);
      }
      step.params.assign(std::istream_iterator<double>(words), {});
    }
  }
  return goldens;
}

at::Tensor golden_gradient(
    int64_t iteration,
    int64_t which,
    const std::string& kind,
    double scale) {
  auto values =
      ((torch::arange(5, torch::kFloat) * 7 + iteration + which).remainder(11) -
       5) /
      4 * scale;
  if (kind != "f") {
    values[iteration % 5] =
        kind == "i" ? std::numeric_limits<double>::infinity() : std::nan("");
  }
  return values.to(testing::test_device());
}

class ScalerGoldenTest : public ::testing::TestWithParam<Golden> {};

template <class O>
void expect_golden(const Golden& golden) {
  GradScaler scaler(golden.options);
  const at::Device device = testing::test_device();
  const std::vector<at::Tensor> params{
      torch::zeros({5}, device).requires_grad_(),
      torch::zeros({5}, device).requires_grad_()};
  O first({params[0]}, 0.25);
  O second({params[1]}, 0.25);
  const std::vector<torch::optim::Optimizer*> optimizers{&first, &second};
  for (size_t i = 0; i < golden.steps.size(); ++i) {
    const Golden::Step& step = golden.steps[i];
    scaler.scale(torch::ones({}, device));
    for (size_t which = 0; which < 2; ++which) {
      if (step.kinds[which] != "-") {
        params[which].mutable_grad() = golden_gradient(
            static_cast<int64_t>(i),
            static_cast<int64_t>(which),
            step.kinds[which],
            scaler.get_scale());
        scaler.step(*optimizers[which]);
      }
    }
    scaler.update(step.new_scale);
    const StateDict state = scaler.state_dict();
    EXPECT_EQ(state.at("scale").to_double(), step.scale) << i;
    EXPECT_EQ(state.at("_growth_tracker").to_int(), step.tracker) << i;
    const auto found =
        torch::cat({params[0], params[1]}).to(at::kCPU, at::kDouble);
    EXPECT_TRUE(
        torch::equal(found.detach(), torch::tensor(step.params, at::kDouble)))
        << i << ": " << found;
  }
}

TEST_P(ScalerGoldenTest, ProducesPyTorchValues) {
  expect_golden<optim::SGD>(GetParam());
  expect_golden<torch::optim::SGD>(GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Python,
    ScalerGoldenTest,
    ::testing::ValuesIn(read_scaler_goldens()),
    [](const auto& test) { return test.param.name; });

TEST(ScalerGoldenFileTest, HasEveryCase) {
  EXPECT_EQ(read_scaler_goldens().size(), 7u);
}

} // namespace
} // namespace tessera
