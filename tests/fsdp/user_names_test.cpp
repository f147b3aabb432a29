// A program that takes in all of our names and has namespaces of its own, which
// are called as rooms of ours.
#include <tessera/tessera.h>

#include <gtest/gtest.h>

namespace comm {
constexpr int kOwn = 1;
} // namespace comm
namespace ddp {
constexpr int kOwn = 2;
} // namespace ddp
namespace deferred {
constexpr int kOwn = 4;
} // namespace deferred
namespace engine {
constexpr int kOwn = 8;
} // namespace engine
namespace fsdp {
constexpr int kOwn = 16;
} // namespace fsdp
namespace libtorch {
constexpr int kOwn = 32;
} // namespace libtorch
namespace nn {
constexpr int kOwn = 64;
} // namespace nn
namespace plan {
constexpr int kOwn = 128;
} // namespace plan
namespace recomputation {
constexpr int kOwn = 256;
} // namespace recomputation
namespace state {
constexpr int kOwn = 512;
} // namespace state
namespace transfer {
constexpr int kOwn = 1024;
} // namespace transfer
namespace zero {
constexpr int kOwn = 2048;
} // namespace zero

namespace {

using namespace tessera; // NOLINT: what this test is about

TEST(UserNamesTest, MayBeThoseOfOurRooms) {
  EXPECT_EQ(
      comm::kOwn + ddp::kOwn + deferred::kOwn + engine::kOwn + fsdp::kOwn +
          libtorch::kOwn + nn::kOwn + plan::kOwn + recomputation::kOwn +
          state::kOwn + transfer::kOwn + zero::kOwn,
      4095);
  EXPECT_FALSE(Group().valid());
}

} // namespace
