// The same program under each launcher gives the same result.
#include <unistd.h>

#include "checkpoint/disk/python.h"
#include "fetched_launchers.h"
#include "support/command.h"

namespace tessera {
namespace {

using tessera::checkpoint::python_with_torch;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

const std::string kLine = "sum=10 world=4 backend=shm";

void expect_four_sums(const CommandResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(num_times(result.output, kLine), 4) << result.output;
}

using Variables = std::map<std::string, std::optional<std::string>>;

CommandResult launch(
    std::vector<std::string> words,
    const Variables& variables = {}) {
  words.push_back(bin_dir() + "/comm_probe");
  words.push_back("all_reduce");
  CommandOptions options{.environment = without_launcher()};
  options.environment["OMP_NUM_THREADS"] = "1";
  for (const auto& [name, value] : variables) {
    options.environment[name] = value;
  }
  return run_command(words, options);
}

/// The variables of a Slurm batch script; srun gives a step id as well.
const Variables kAllocation{
    {"SLURM_JOB_ID", "1"},
    {"SLURM_JOBID", "1"},
    {"SLURM_NTASKS", "4"},
    {"SLURM_NNODES", "1"},
    {"SLURM_PROCID", "0"},
    {"SLURM_LOCALID", "0"}};

bool is_on_path(const std::string& program) {
  return run_command({"which", program}).exit_code == 0;
}

TEST(LaunchersTest, AllReduceUnderTesseraRun) {
  expect_four_sums(launch({tessera_program(), "run", "-n", "4"}));
}

TEST(LaunchersTest, AllReduceInsideASlurmAllocation) {
  expect_four_sums(launch({tessera_program(), "run", "-n", "4"}, kAllocation));
  const auto alone = launch({}, kAllocation);
  EXPECT_EQ(alone.exit_code, 0) << alone.output;
  EXPECT_THAT(alone.output, HasSubstr("sum=1 world=1"));
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
  EXPECT_EQ(num_times(result.output, "sum 3.0"), 2) << result.output;
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
  // OpenMPI looks for ssh even where no other host is asked for; not all hosts
  // have it.
  std::vector<std::string> words{
      "mpirun", "--mca", "plm", "isolated", "--oversubscribe", "-np", "4"};
  if (getuid() == 0) {
    words.insert(words.begin() + 1, "--allow-run-as-root");
  }
  expect_four_sums(launch(words));
}

std::string mpiexec_of_mpich() {
  return (launchers_root() / "usr/bin/mpiexec.hydra").string();
}

/// MPICH gives no job id: ranks find one another through the process that
/// started them, also with a shell in between.
TEST(LaunchersTest, AllReduceUnderMpich) {
  if (launchers_root().empty()) {
    GTEST_SKIP() << "no MPICH here: `make setup` could not fetch it";
  }
  const std::vector<std::string> mpiexec{mpiexec_of_mpich(), "-n", "4"};
  expect_four_sums(launch(mpiexec, launchers_environment()));
  std::vector<std::string> wrapped = mpiexec;
  wrapped.insert(wrapped.end(), {"sh", "-c", "\"$0\" \"$@\"; exit $?"});
  expect_four_sums(launch(wrapped, launchers_environment()));
}

/// Two runs of one user at the same time do not meet.
TEST(LaunchersTest, RunsOfMpichAreKeptApart) {
  if (launchers_root().empty()) {
    GTEST_SKIP() << "no MPICH here: `make setup` could not fetch it";
  }
  const std::vector<std::string> words{
      mpiexec_of_mpich(), "-n", "4", bin_dir() + "/comm_probe", "again"};
  const CommandOptions options{.environment = launchers_environment()};
  Command first(words, options);
  Command second(words, options);
  expect_four_sums(first.wait());
  expect_four_sums(second.wait());
}

TEST(LaunchersTest, AllReduceAlone) {
  const auto result = launch({});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, HasSubstr("sum=1 world=1 backend=none"));
}

} // namespace
} // namespace tessera
