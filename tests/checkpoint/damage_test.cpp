// Files that changed after they were written.
#include <tessera/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using checkpoint::LoadOptions;
using checkpoint::Verify;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

StateDict small_state(float value) {
  return {
      {"a", torch::full({40}, value)},
      {"b", torch::full({3, 5}, value)},
      {"step", static_cast<int64_t>(value)}};
}

TEST(DamageTest, AnyFlippedBitIsFoundAndNamed) {
  const TempFolder folder;
  checkpoint::save(small_state(1), folder / "c");
  int flipped = 0;
  for (const std::string& name : names_in(folder / "c")) {
    const fs::path path = folder / "c" / name;
    const std::string bytes = testing::read_bytes(path);
    for (size_t at = 0; at < bytes.size(); at += 3) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
      testing::write_bytes(path, damaged);
      StateDict target = small_state(0);
      const std::string error = error_of([&] {
        checkpoint::load(
            target, folder / "c", LoadOptions().verify(Verify::First));
      });
      ASSERT_THAT(error, HasSubstr(name)) << "byte " << at;
      ASSERT_EQ(diff_state_dicts(target, small_state(0)), "")
          << name << " byte " << at;
      ++flipped;
    }
    testing::write_bytes(path, bytes);
  }
  EXPECT_GT(flipped, 1500);
  StateDict target = small_state(0);
  checkpoint::load(target, folder / "c");
  EXPECT_EQ(diff_state_dicts(target, small_state(1)), "");
}

TEST(DamageTest, AnyTruncatedFileIsFoundAndNamed) {
  const TempFolder folder;
  checkpoint::save(small_state(1), folder / "c");
  for (const std::string& name : names_in(folder / "c")) {
    const fs::path path = folder / "c" / name;
    const std::string bytes = testing::read_bytes(path);
    for (size_t size = 0; size < bytes.size(); size += 7) {
      testing::write_bytes(path, bytes.substr(0, size));
      StateDict target = small_state(0);
      const std::string error =
          error_of([&] { checkpoint::load(target, folder / "c"); });
      ASSERT_THAT(error, HasSubstr(name)) << "size " << size;
      ASSERT_EQ(diff_state_dicts(target, small_state(0)), "");
    }
    fs::remove(path);
    if (name != ".checksums") { // without it, the folder is like those of other
                                // programs
      StateDict target = small_state(0);
      EXPECT_NE(
          error_of([&] { checkpoint::load(target, folder / "c"); }),
          "nothing was thrown");
    }
    testing::write_bytes(path, bytes);
  }
}

TEST(DamageTest, EveryRankIsToldWhileReading) {
  on_ranks(3, [](const Group& world) {
    const TempFolder folder(world);
    const at::Tensor whole = torch::randn({300, 50});
    StateDict state{{"w", testing::cut(whole, testing::Cut::Rows, world)}};
    checkpoint::save(state, folder / "c");
    if (world.rank() == 0) {
      std::string bytes = testing::read_bytes(folder / "c" / "__2_0.distcp");
      bytes[bytes.size() / 2] ^= 4;
      testing::write_bytes(folder / "c" / "__2_0.distcp", bytes);
    }
    world.barrier();
    const std::string error =
        error_of([&] { checkpoint::load(state, folder / "c"); });
    EXPECT_THAT(
        error,
        AllOf(HasSubstr("__2_0.distcp"), HasSubstr("another checkpoint")));
  });
}

TEST(DamageTest, NeverLooksAtSumsWhenToldSo) {
  const TempFolder folder;
  checkpoint::save({{"a", torch::zeros({1000})}}, folder / "c");
  const fs::path path = folder / "c" / "__0_0.distcp";
  std::string bytes = testing::read_bytes(path);
  bytes[2000] ^= 1; // among the zeros
  testing::write_bytes(path, bytes);
  StateDict target{{"a", torch::zeros({1000})}};
  EXPECT_THAT(
      error_of([&] { checkpoint::load(target, folder / "c"); }),
      HasSubstr("__0_0.distcp"));
  checkpoint::load(target, folder / "c", LoadOptions().verify(Verify::Never));
}

} // namespace
} // namespace tessera
