// Programs with an MPI of their own, under OpenMPI and under MPICH.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "fetched_launchers.h"
#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

struct Mpi {
  std::string name; // of the programs that were built with it
  std::string missing; // what to say where there are none
};

const Mpi kMpis[] = {
    {"openmpi", "no headers of OpenMPI here (Debian: libopenmpi-dev)"},
    {"mpich", "no MPICH here: `make setup` could not fetch it"}};

/// The programs are built where the headers of an MPI are found.
bool is_built(const Mpi& mpi) {
  return access((bin_dir() + "/mpi_orders_" + mpi.name).c_str(), X_OK) == 0;
}

CommandResult run_under(
    const Mpi& mpi,
    int num_ranks,
    std::vector<std::string> words) {
  std::vector<std::string> line;
  CommandOptions options{.environment = without_launcher()};
  if (mpi.name == "mpich") {
    options.environment = launchers_environment();
    line = {(launchers_root() / "usr/bin/mpiexec.hydra").string()};
  } else {
    // OpenMPI looks for ssh even where no other host is asked for; not all
    // hosts have it.
    line = {"mpirun", "--mca", "plm", "isolated", "--oversubscribe"};
    if (getuid() == 0) {
      line.emplace_back("--allow-run-as-root");
    }
  }
  options.environment["OMP_NUM_THREADS"] = "1";
  options.timeout = std::chrono::minutes(4);
  line.insert(line.end(), {"-n", std::to_string(num_ranks)});
  words.front() = bin_dir() + "/" + words.front() + "_" + mpi.name;
  line.insert(line.end(), words.begin(), words.end());
  return run_command(line, options);
}

class MpiTest : public ::testing::TestWithParam<std::tuple<Mpi, int>> {
 protected:
  void SetUp() override {
    if (!is_built(mpi())) {
      GTEST_SKIP() << mpi().missing;
    }
  }
  const Mpi& mpi() const {
    return mpi_;
  }
  int num_ranks() const {
    return std::get<1>(GetParam());
  }
  void expect_agreement(std::vector<std::string> words) const {
    words.insert(words.begin(), "mpi_orders");
    const auto result = run_under(mpi(), num_ranks(), words);
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_EQ(
        num_times(
            result.output,
            " of " + std::to_string(num_ranks()) + ": both agree"),
        num_ranks())
        << result.output;
  }

 private:
  const Mpi mpi_ = std::get<0>(GetParam());
};

TEST_P(MpiTest, MpiBeginsFirstAndEndsLast) {
  expect_agreement({"mpi", "tessera"});
}

TEST_P(MpiTest, MpiBeginsFirstAndEndsFirst) {
  expect_agreement({"mpi", "mpi"});
}

TEST_P(MpiTest, TesseraBeginsFirstAndEndsLast) {
  expect_agreement({"tessera", "mpi"});
}

TEST_P(MpiTest, TesseraBeginsFirstAndEndsFirst) {
  expect_agreement({"tessera", "tessera"});
}

TEST_P(MpiTest, AnMpiOfManyThreadsIsNoDifferent) {
  expect_agreement({"mpi", "tessera", "multiple"});
}

TEST_P(MpiTest, TheProgramOfThePageTrainsInsideItsSolver) {
  const auto result = run_under(mpi(), num_ranks(), {"mpi_solver"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output, HasSubstr(std::to_string(num_ranks()) + " ranks: loss "));
}

INSTANTIATE_TEST_SUITE_P(
    Mpis,
    MpiTest,
    ::testing::Combine(::testing::ValuesIn(kMpis), ::testing::Values(2, 4)),
    [](const auto& test) {
      return std::get<0>(test.param).name +
          std::to_string(std::get<1>(test.param));
    });

std::string text_of(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_FALSE(text.str().empty()) << path;
  return text.str();
}

TEST(MpiPageTest, ShowsTheProgramThatIsRun) {
  const std::string root = TESSERA_SOURCE_ROOT;
  EXPECT_THAT(
      text_of(root + "/docs/mpi.md"),
      HasSubstr(
          "```cpp\n" + text_of(root + "/examples/mpi_solver.cpp") + "```"));
}

} // namespace
} // namespace tessera
