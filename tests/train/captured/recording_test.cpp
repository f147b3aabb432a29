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

class RecordingOfTheCpu : public libtorch::Recording {
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
    answers.push_back(libtorch::is_recorded_here());
    return gradients;
  }
};

/// As autograd's thread of a device runs it for the thread that records.
TEST(RecordingTest, ABackwardOnAnotherThreadIsRecorded) {
  const auto asks_elsewhere = [] {
    bool outside = true;
    std::thread([&] {
      outside = libtorch::is_recorded_here();
      const auto x = torch::ones({}, at::TensorOptions().requires_grad(true));
      AsksInBackward::apply(x).backward();
    }).join();
    EXPECT_FALSE(outside); // of a backward
    return AsksInBackward::answers.back();
  };
  EXPECT_FALSE(libtorch::is_recorded_here());
  EXPECT_FALSE(asks_elsewhere());
  RecordingOfTheCpu recording;
  {
    const libtorch::RecordingScope scope(recording, {});
    EXPECT_TRUE(libtorch::is_recorded_here());
    EXPECT_TRUE(asks_elsewhere());
  }
  EXPECT_FALSE(libtorch::is_recorded_here());
  EXPECT_FALSE(asks_elsewhere());
}

TEST(RecordingTest, OnlyExpectedObjectsMayBeUsed) {
  const int known = 0;
  const int strange = 0;
  libtorch::expect_in_recording(&strange, "blocks.1"); // nothing is recorded
  RecordingOfTheCpu recording;
  const libtorch::RecordingScope scope(recording, {&known});
  libtorch::expect_in_recording(&known, "blocks.0");
  EXPECT_THAT(
      error_of([&] { libtorch::expect_in_recording(&strange, "blocks.1"); }),
      HasSubstr("blocks.1"));
}

} // namespace
} // namespace tessera
