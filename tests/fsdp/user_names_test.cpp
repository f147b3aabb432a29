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
namespace engine {
constexpr int kOwn = 4;
} // namespace engine
namespace fsdp {
constexpr int kOwn = 8;
} // namespace fsdp
namespace transfer {
constexpr int kOwn = 16;
} // namespace transfer
namespace zero {
constexpr int kOwn = 32;
} // namespace zero

namespace {

using namespace tessera; // NOLINT: what this test is about

TEST(UserNamesTest, MayBeThoseOfOurRooms) {
  EXPECT_EQ(
      comm::kOwn + ddp::kOwn + engine::kOwn + fsdp::kOwn + transfer::kOwn +
          zero::kOwn,
      63);
  EXPECT_FALSE(Group().valid());
}

} // namespace
