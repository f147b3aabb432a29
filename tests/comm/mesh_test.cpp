#include <tessera/comm/mesh.h>
#include <tessera/error.h>

#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(MeshTest, LaysRanksOutRowMajor) {
  on_ranks(4, [](const Group& world) {
    const Mesh mesh(world, {2, 2}, {"replicate", "shard"});
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.size("shard"), 2);
    EXPECT_THAT(
        mesh.coordinate(), ElementsAre(world.rank() / 2, world.rank() % 2));
    EXPECT_EQ(mesh.axis_rank("replicate"), world.rank() / 2);
    EXPECT_EQ(mesh.to_string(), "Mesh(replicate=2, shard=2)");
    const int row = world.rank() / 2 * 2;
    EXPECT_THAT(mesh.group("shard").global_ranks(), ElementsAre(row, row + 1));
    const int column = world.rank() % 2;
    EXPECT_THAT(
        mesh.group("replicate").global_ranks(),
        ElementsAre(column, column + 2));
    auto sum = torch::full({1}, world.rank() * 1.0f);
    mesh.group("replicate").all_reduce(sum);
    EXPECT_EQ(sum.item<float>(), 2 * column + 2);
  });
}

TEST(MeshTest, SubmeshKeepsThePlaceOnTheOtherAxes) {
  on_ranks(4, [](const Group& world) {
    const Mesh mesh(world, {2, 1, 2}, {"a", "b", "c"});
    const Mesh c = mesh["c"];
    EXPECT_EQ(c.ndim(), 1);
    EXPECT_EQ(c.group().size(), 2);
    EXPECT_THAT(c.axis_names(), ElementsAre("c"));
    const Mesh turned = mesh.submesh({"c", "a"});
    EXPECT_THAT(turned.shape(), ElementsAre(2, 2));
    EXPECT_THAT(
        turned.coordinate(), ElementsAre(world.rank() % 2, world.rank() / 2));
    EXPECT_THAT(turned.global_ranks(), ElementsAre(0, 2, 1, 3));
    EXPECT_EQ(turned.group().rank(), world.rank() % 2 * 2 + world.rank() / 2);
    const bool odd = world.rank() % 2 == 1;
    EXPECT_THROW(
        mesh.submesh({odd ? "c" : "a", odd ? "a" : "c"}), DisagreementError);
    const Mesh ab = mesh.submesh({"a", "b"});
    EXPECT_THAT(
        ab.global_ranks(), ElementsAre(world.rank() % 2, world.rank() % 2 + 2));
  });
}

TEST(MeshTest, OneAxisIsTheGroupItself) {
  on_ranks(3, [](const Group& world) {
    const Mesh mesh(world, {3});
    EXPECT_THAT(mesh.axis_names(), ElementsAre("0"));
    EXPECT_EQ(&mesh.group("0").impl(), &world.impl());
    const Mesh through_world = make_mesh({1, 3}, {"x", "y"});
    EXPECT_EQ(through_world.group("x").size(), 1);
    EXPECT_EQ(through_world.group("x").backend(), "none");
  });
}

TEST(MeshTest, RejectsShapesThatDoNotFit) {
  on_ranks(2, [](const Group& world) {
    const auto error_of = [&](std::vector<int64_t> shape,
                              std::vector<std::string> names) {
      try {
        Mesh mesh(world, std::move(shape), std::move(names));
      } catch (const c10::Error& error) {
        return std::string(error.what());
      }
      return std::string("nothing was thrown");
    };
    EXPECT_THAT(
        error_of({4, 2}, {"a", "b"}),
        HasSubstr(
            "[make_mesh] rank " + std::to_string(world.rank()) +
            "/2: shape {4, 2} needs 8 processes, the group has 2. Start 8"));
    EXPECT_THAT(
        error_of({2}, {"a", "b"}), HasSubstr("as many different names"));
    EXPECT_THAT(
        error_of({2, 1}, {"a", "a"}), HasSubstr("as many different names"));
    EXPECT_THAT(error_of({}, {}), HasSubstr("at least one axis"));
    EXPECT_THAT(error_of({2, 0}, {"a", "b"}), HasSubstr("size 1 or more"));
    const bool first = world.rank() == 0;
    EXPECT_THAT(
        error_of({first ? 1 : 2, first ? 2 : 1}, {"a", "b"}),
        HasSubstr("rank 0: shape {1, 2}"));
    const Mesh mesh(world, {2}, {"dp"});
    EXPECT_THROW(mesh.group("tp"), c10::ValueError);
    EXPECT_THROW(mesh.submesh({"dp", "dp"}), c10::ValueError);
  });
}

} // namespace
} // namespace tessera
