// Who is part of a step that is recorded.
#include "libtorch/recording.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "support/errors.h"

namespace tessera {
namespace {

using ::tessera::testing::error_of;
using ::testing::HasSubstr;

class RecordingOfTheCpu : public engine::Recording {
 public:
  c10::Device device() const override {
    return c10::kCPU;
  }
  uint64_t random_position() const override {
    return 0;
  }
};

/// Notes who asks in a backward.
struct AsksInBackward : torch::autograd::Function<AsksInBackward> {
  static inline std::vector<bool> answers;

  static at::Tensor forward(
      torch::autograd::AutogradContext* /*context*/,
      const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      const torch::autograd::variable_list& gradients) {
    answers.push_back(engine::is_recorded_here());
    return gradients;
  }
};

/// As autograd's thread of a device runs it for the thread that records.
TEST(RecordingTest, ABackwardOnAnotherThreadIsRecorded) {
  const auto asks_elsewhere = [] {
    bool outside = true;
    std::thread([&] {
      outside = engine::is_recorded_here();
      const auto x = torch::ones({}, at::TensorOptions().requires_grad(true));
      AsksInBackward::apply(x).backward();
    }).join();
    EXPECT_FALSE(outside); // of a backward
    return AsksInBackward::answers.back();
  };
  EXPECT_FALSE(engine::is_recorded_here());
  EXPECT_FALSE(asks_elsewhere());
  RecordingOfTheCpu recording;
  {
    const engine::RecordingScope scope(recording, {});
    EXPECT_TRUE(engine::is_recorded_here());
    EXPECT_TRUE(asks_elsewhere());
  }
  EXPECT_FALSE(engine::is_recorded_here());
  EXPECT_FALSE(asks_elsewhere());
}

TEST(RecordingTest, OnlyExpectedObjectsMayBeUsed) {
  const int known = 0;
  const int strange = 0;
  engine::expect_in_recording(&strange, "blocks.1"); // nothing is recorded
  RecordingOfTheCpu recording;
  const engine::RecordingScope scope(recording, {&known});
  engine::expect_in_recording(&known, "blocks.0");
  EXPECT_THAT(
      error_of([&] { engine::expect_in_recording(&strange, "blocks.1"); }),
      HasSubstr("blocks.1"));
}

} // namespace
} // namespace tessera
