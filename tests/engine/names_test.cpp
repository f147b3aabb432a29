#include "engine/names.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(RecomputeNamesTest, SegmentsOfWrappersAreDropped) {
  using engine::clean_name;
  EXPECT_EQ(clean_name(""), "");
  EXPECT_EQ(clean_name("weight"), "weight");
  EXPECT_EQ(clean_name("_checkpoint_wrapped_module"), "");
  EXPECT_EQ(clean_name("_checkpoint_wrapped_module.weight"), "weight");
  EXPECT_EQ(clean_name("a._fsdp_wrapped_module"), "a");
  EXPECT_EQ(
      clean_name(
          "_fsdp_wrapped_module.a._fsdp_wrapped_module._checkpoint_wrapped_module.0.b"),
      "a.0.b");
  // Whole segments only.
  EXPECT_EQ(
      clean_name("my_checkpoint_wrapped_module.x"),
      "my_checkpoint_wrapped_module.x");
  EXPECT_EQ(
      clean_name("_checkpoint_wrapped_module2.x"),
      "_checkpoint_wrapped_module2.x");
}

} // namespace
} // namespace tessera
