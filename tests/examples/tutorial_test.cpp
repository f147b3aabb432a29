// The two programs of the tutorial learn the same, also over a change of ranks.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <sstream>

#include "support/command.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace tessera::testing; // NOLINT: the fixture of these tests

class TutorialTest : public ::testing::Test {
 protected:
  TutorialTest() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~TutorialTest() override {
    fs::remove_all(folder_);
  }

  /// Losses by step, as a program prints them.
  std::map<int, double> losses_of(const std::string& command) {
    auto environment = without_launcher();
    environment["OMP_NUM_THREADS"] = "1";
    const auto result = run_command(
        {"sh", "-c", "cd " + folder_.string() + " && " + command},
        {.environment = environment});
    EXPECT_EQ(result.exit_code, 0) << result.output;
    std::map<int, double> losses;
    std::istringstream lines(result.output);
    for (std::string line; std::getline(lines, line);) {
      int step = 0;
      double loss = 0;
      const size_t at = line.find("step ");
      if (at != std::string::npos &&
          std::sscanf(line.c_str() + at, "step %d loss %lf", &step, &loss) ==
              2) {
        losses[step] = loss;
      }
    }
    return losses;
  }

  const fs::path folder_ =
      fs::temp_directory_path() / ("tutorial-test-" + std::to_string(getpid()));
  const std::string before_ = bin_dir() + "/before";
  const std::string after_ = bin_dir() + "/after";
};

TEST_F(TutorialTest, FourRanksThatResumeWhatTwoBeganMatchThePlainProgram) {
  const auto plain = losses_of(before_ + " 100");
  ASSERT_EQ(plain.size(), 5u);
  EXPECT_LT(plain.at(100), 0.8 * plain.at(20));

  auto sharded = losses_of(tessera_program() + " run -n 2 " + after_ + " 50");
  EXPECT_EQ(sharded.size(), 2u);
  sharded.merge(losses_of(tessera_program() + " run -n 4 " + after_ + " 100"));
  ASSERT_EQ(sharded.size(), 5u);
  for (const auto& [step, loss] : plain) {
    EXPECT_NEAR(sharded.at(step), loss, 1e-3) << "step " << step;
  }
}

// 64 rows are 22, 21 and 21: each counts once all the same.
TEST_F(TutorialTest, RanksThatCannotShareTheRowsEvenlyMatchThePlainProgram) {
  const auto plain = losses_of(before_ + " 40");
  const auto uneven =
      losses_of(tessera_program() + " run -n 3 " + after_ + " 40");
  ASSERT_EQ(uneven.size(), 2u);
  for (const auto& [step, loss] : plain) {
    EXPECT_NEAR(uneven.at(step), loss, 1.5e-4) << "step " << step;
  }
}

TEST_F(TutorialTest, AfterRunsAlone) {
  EXPECT_EQ(losses_of(after_ + " 20").size(), 1u);
}

} // namespace
} // namespace tessera
