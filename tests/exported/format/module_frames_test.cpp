#include "exported/format/module_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/format/support.h"

namespace tessera::exported {
namespace {

using ::testing::HasSubstr;

/// "path|class|call" of each module.
std::vector<std::string> frames(
    const std::string& text,
    const std::vector<std::string>& paths = {}) {
  std::vector<std::string> all;
  for (const auto& frame : read_module_frames(text, OddPaths(paths))) {
    all.push_back(
        frame.path + "|" + frame.class_name + "|" + std::to_string(frame.call));
  }
  return all;
}

using Frames = std::vector<std::string>;

TEST(ModuleFramesTest, ModulesFromTheRootInwards) {
  EXPECT_EQ(frames(""), Frames{});
  EXPECT_EQ(
      frames("L__self__,,a.Model;L__self__layers.0,layers.0,a.Layer"),
      (Frames{"|a.Model|0", "layers.0|a.Layer|0"}));
  EXPECT_EQ(
      frames("L__self__,,a.M;140324388983952@2,layers.0,a.Layer"),
      (Frames{"|a.M|0", "layers.0|a.Layer|2"}));
}

TEST(ModuleFramesTest, NodesThatTorchMadeHaveNoModules) {
  const std::string hook = "_empty_nn_module_stack_from_metadata_hook";
  EXPECT_EQ(frames(hook + "," + hook + "," + hook), Frames{});
}

TEST(ModuleFramesTest, ClassesMayHaveCommasAndBrackets) {
  EXPECT_EQ(
      frames("k,p,a.Pair[int, str];q,r,b.f.<locals>.M"),
      (Frames{"p|a.Pair[int, str]|0", "r|b.f.<locals>.M|0"}));
  EXPECT_EQ(
      frames("L['self'].layers[0],layers.0,a.B[(1;2), 3]"),
      (Frames{"layers.0|a.B[(1;2), 3]|0"}));
  EXPECT_EQ(frames("k,p,odd, class"), (Frames{"p|odd, class|0"}));
}

TEST(ModuleFramesTest, PathsMayHaveSeparators) {
  const std::string text =
      "L__self__,,M;L__self__d.a,b;c,d.a,b;c,N;L__self__d.a,b;c.x@1,d.a,b;c.x,O";
  EXPECT_EQ(
      frames(text, {"", "d", "d.a,b;c", "d.a,b;c.x"}),
      (Frames{"|M|0", "d.a,b;c|N|0", "d.a,b;c.x|O|1"}));
  EXPECT_EQ(
      frames("k.a)],k.a)],M;k,k,N", {"k.a)]"}), (Frames{"k.a)]|M|0", "k|N|0"}));
}

TEST(ModuleFramesTest, OtherTextIsRefused) {
  for (const auto* text : {"a", "a,b", "a,,c;b", ";"}) {
    EXPECT_THAT(
        format::refusal([&] { frames(text); }),
        HasSubstr("is not of the form KEY,PATH,CLASS"))
        << text;
  }
}

} // namespace
} // namespace tessera::exported
