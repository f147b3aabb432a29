// The same program under each launcher gives the same result.
#include <unistd.h>

#include "checkpoint/store/python.h"
#include "support/command.h"

namespace tessera {
namespace {

using tessera::checkpoint::python_with_torch;
using tessera::testing::bin_dir;
using tessera::testing::CommandOptions;
using tessera::testing::CommandResult;
using tessera::testing::run_command;
using tessera::testing::tessera_program;
using tessera::testing::without_launcher;
using ::testing::HasSubstr;

const std::string kLine = "sum=10 world=4 backend=shm";

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + 1)) {
    ++found;
  }
  return found;
}

void expect_four_sums(const CommandResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(count(result.output, kLine), 4) << result.output;
}

CommandResult launch(std::vector<std::string> words) {
  words.push_back(bin_dir() + "/comm_probe");
  words.push_back("all_reduce");
  CommandOptions options{.environment = without_launcher()};
  options.environment["OMP_NUM_THREADS"] = "1";
  return run_command(words, options);
}

bool is_on_path(const std::string& program) {
  return run_command({"which", program}).exit_code == 0;
}

TEST(LaunchersTest, AllReduceUnderTesseraRun) {
  expect_four_sums(launch({tessera_program(), "run", "-n", "4"}));
}

/// PyTorch's own ranks meet in our store.
TEST(LaunchersTest, PythonUnderTesseraRun) {
  const std::string python = python_with_torch();
  if (python.empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  const auto result = run_command(
      {tessera_program(),
       "run",
       "-n",
       "2",
       python,
       "-c",
       "import torch, torch.distributed as dist\n"
       "dist.init_process_group('gloo')\n"
       "sum = torch.ones(1) * (dist.get_rank() + 1)\n"
       "dist.all_reduce(sum)\n"
       "dist.barrier()\n"
       "print('sum', sum.item())\n"
       "dist.destroy_process_group()\n"},
      {.environment = without_launcher()});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(count(result.output, "sum 3.0"), 2) << result.output;
}

TEST(LaunchersTest, AllReduceUnderTorchrun) {
  const std::string python = python_with_torch();
  if (python.empty()) {
    GTEST_SKIP() << "this LibTorch came without Python, so without torchrun";
  }
  expect_four_sums(launch(
      {python,
       "-m",
       "torch.distributed.run",
       "--no-python",
       "--nproc-per-node",
       "4",
       "--standalone"}));
}

TEST(LaunchersTest, AllReduceUnderMpirun) {
  if (!is_on_path("mpirun")) {
    GTEST_SKIP() << "no mpirun here (Debian: openmpi-bin)";
  }
  std::vector<std::string> words{"mpirun", "--oversubscribe", "-np", "4"};
  if (getuid() == 0) {
    words.insert(words.begin() + 1, "--allow-run-as-root");
  }
  expect_four_sums(launch(words));
}

TEST(LaunchersTest, AllReduceAlone) {
  const auto result = launch({});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, HasSubstr("sum=1 world=1 backend=none"));
}

} // namespace
} // namespace tessera
