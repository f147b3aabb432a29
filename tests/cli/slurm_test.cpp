// Under a real Slurm: tasks of srun, and every launcher inside a batch script.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "checkpoint/disk/python.h"
#include "fetched_launchers.h"
#include "slurm_cluster.h"
#include "support/command.h"

namespace tessera {
namespace {

using tessera::checkpoint::python_with_torch;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

void expect_sums(
    const CommandResult& result,
    int ranks,
    const std::string& line) {
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(num_times(result.output, line), ranks) << result.output;
}

/// Long enough for any machine; false if it never holds.
bool wait_until(const std::function<bool()>& condition) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(240);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return true;
}

std::string read_text(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

const std::string kProbe = bin_dir() + "/comm_probe";
const std::string kTwo = "sum=3 world=2 backend=shm";
const std::string kFour = "sum=10 world=4 backend=shm";

/// One cluster for all tests.
class SlurmTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    cluster_ = new SlurmCluster;
  }
  static void TearDownTestSuite() {
    delete std::exchange(cluster_, nullptr);
  }
  void SetUp() override {
    if (!cluster_->problem().empty()) {
      GTEST_SKIP() << cluster_->problem();
    }
  }

  static fs::path write_script(
      const std::string& name,
      const std::string& text) {
    const fs::path path = cluster_->work() / name;
    std::ofstream(path) << text;
    fs::permissions(path, fs::perms(0755));
    return path;
  }

  /// Runs a batch script to its end and returns what it printed.
  CommandResult run_batch(
      const std::vector<std::string>& options,
      const std::string& script,
      Submitter submitter = Submitter::Self) {
    static int number = 0;
    const std::string name = "batch" + std::to_string(number++);
    std::vector<std::string> words{"sbatch", "--wait", "-o", name + ".out"};
    words.insert(words.end(), options.begin(), options.end());
    words.push_back(write_script(name, "#!/bin/bash\n" + script).string());
    CommandResult result = cluster_->run(words, submitter);
    result.output += read_text(cluster_->work() / (name + ".out"));
    return result;
  }

  static SlurmCluster* cluster_;
};

SlurmCluster* SlurmTest::cluster_ = nullptr;

TEST_F(SlurmTest, TwoTasksOfSrunMeet) {
  expect_sums(cluster_->run({"srun", "-n", "2", kProbe}), 2, kTwo);
}

TEST_F(SlurmTest, FourTasksOfSrunMeetWithAndWithoutPmi) {
  for (const char* mpi : {"none", "pmi2"}) {
    expect_sums(
        cluster_->run(
            {"srun",
             "-n",
             "4",
             "--overcommit",
             std::string("--mpi=") + mpi,
             kProbe}),
        4,
        kFour);
  }
}

/// Slurm does not say how tasks of another node reach the first one.
TEST_F(SlurmTest, TasksOnSeveralNodesNeedAnAddress) {
  const std::vector<std::string> srun{"srun", "-N", "2", "-n", "4", kProbe};
  const auto without = cluster_->run(srun);
  EXPECT_NE(without.exit_code, 0);
  EXPECT_EQ(num_times(without.output, "Set MASTER_ADDR and MASTER_PORT"), 4)
      << without.output;

  std::vector<std::string> with{
      "env", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29517"};
  with.insert(with.end(), srun.begin(), srun.end());
  expect_sums(cluster_->run(with), 4, kFour);
}

TEST_F(SlurmTest, ABatchScriptMayUseAnyLauncher) {
  const auto result = run_batch(
      {"-n", "4"},
      "set -e\n" + tessera_program() + " run -n 4 " + kProbe +
          "\n"
          "srun " +
          kProbe +
          "\n"
          "mpiexec.hydra -n 4 " +
          kProbe +
          "\n"
          "mpirun --oversubscribe --allow-run-as-root -np 4 " +
          kProbe +
          "\n"
          "srun -n 2 " +
          kProbe + "\n" + kProbe + "\n");
  expect_sums(result, 4 * 4, kFour);
  expect_sums(result, 2, kTwo);
  // A program by itself is alone, in spite of the four tasks.
  expect_sums(result, 1, "sum=1 world=1 backend=none");
}

TEST_F(SlurmTest, ABatchScriptMayUseTorchrun) {
  const std::string python = python_with_torch();
  if (python.empty()) {
    GTEST_SKIP() << "this LibTorch came without Python, so without torchrun";
  }
  const auto result = run_batch(
      {"-n", "4"},
      python +
          " -m torch.distributed.run --no-python --standalone "
          "--nproc-per-node 4 " +
          kProbe + "\n");
  expect_sums(result, 4, kFour);
}

TEST_F(SlurmTest, TheShellOfSallocIsAlone) {
  const auto result = cluster_->run({"salloc", "-n", "4", kProbe});
  expect_sums(result, 1, "sum=1 world=1 backend=none");
  // A step of its own, as salloc makes it for a shell.
  const auto inside = cluster_->run(
      {"salloc",
       "-n",
       "4",
       "srun",
       "--interactive",
       "--preserve-env",
       "-n",
       "1",
       kProbe});
  expect_sums(inside, 1, "sum=1 world=1 backend=none");
}

TEST_F(SlurmTest, TheDoctorTellsTheTruthInABatchScript) {
  const auto result = run_batch({"-n", "4"}, tessera_program() + " doctor\n");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("a program is alone here"), HasSubstr("launch        ok")));
}

/// The timeout is ten minutes: so it is the death that is noticed.
TEST_F(SlurmTest, AKilledTaskIsNamedAtOnce) {
  const auto result =
      cluster_->run({"srun", "-n", "2", "--unbuffered", kProbe, "die", "1"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(
      result.output, AllOf(HasSubstr("ERROR peer lost"), HasSubstr("rank 1")));
  const auto time_of = [&](const std::string& words) {
    const size_t at = result.output.find(words);
    return at == std::string::npos
        ? -1
        : std::atoll(result.output.c_str() + at + words.size());
  };
  const auto died = time_of("dies at ");
  const auto noticed = time_of("noticed at ");
  ASSERT_GT(died, 0) << result.output;
  ASSERT_GT(noticed, 0) << result.output;
  // Milliseconds. A second is what it takes on a quiet host.
  EXPECT_LT(noticed - died, 10'000) << result.output;
  RecordProperty("milliseconds", std::to_string(noticed - died));
}

TEST_F(SlurmTest, ACancelledJobPassesTheSignalToTheRanks) {
  const std::string script = tessera_program() +
      " run -n 2 sh -c 'trap \"echo caught; exit 0\" TERM; echo ready; "
      "while :; do sleep 0.1; done'\n";
  const fs::path path =
      write_script("cancelled", "#!/bin/bash\nexec " + script);
  const auto submitted = cluster_->run(
      {"sbatch", "--parsable", "-o", "cancelled.out", path.string()});
  ASSERT_EQ(submitted.exit_code, 0) << submitted.output;
  const std::string id =
      submitted.output.substr(0, submitted.output.find('\n'));
  const fs::path output = cluster_->work() / "cancelled.out";
  ASSERT_TRUE(wait_until([&] {
    return num_times(read_text(output), "ready") == 2;
  })) << read_text(output);
  cluster_->run({"scancel", "--full", "--signal=TERM", id});
  ASSERT_TRUE(wait_until([&] {
    return num_times(read_text(output), "interrupted by SIGTERM") == 1;
  })) << read_text(output);
  EXPECT_EQ(num_times(read_text(output), "caught"), 2) << read_text(output);
}

TEST_F(SlurmTest, AnotherUserStartsRanksInEveryWay) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "only root can be another user";
  }
  const auto readable =
      cluster_->run({"test", "-x", kProbe}, Submitter::Nobody);
  if (readable.exit_code != 0) {
    GTEST_SKIP() << "the user nobody cannot enter the folder of this checkout";
  }
  expect_sums(
      cluster_->run({"srun", "-n", "2", kProbe}, Submitter::Nobody), 2, kTwo);
  const auto result = run_batch(
      {"-n", "2"},
      "set -e\nid -un\n" + tessera_program() + " run -n 2 " + kProbe +
          "\n"
          "mpiexec.hydra -n 2 " +
          kProbe +
          "\n"
          "mpirun --oversubscribe -np 2 " +
          kProbe + "\n",
      Submitter::Nobody);
  expect_sums(result, 3 * 2, kTwo);
  EXPECT_THAT(result.output, HasSubstr("nobody\n"));
}

/// The script of docs/launching.md, as it stands there.
std::string documented_script() {
  const std::string page = read_text(TESSERA_LAUNCHING_PAGE);
  const std::string first = "```sh\n#!/bin/bash\n#SBATCH";
  const size_t begin = page.find(first);
  const size_t end = page.find("\n```", begin + first.size());
  if (begin == std::string::npos || end == std::string::npos) {
    return "";
  }
  return page.substr(begin + 6, end + 1 - (begin + 6));
}

/// "step  40  loss 0.1234" of the log, by step; the text of each step must be
/// the same whenever it was printed.
std::map<int, std::string> losses(const std::string& log) {
  std::map<int, std::string> result;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find("step ");
    if (at == std::string::npos || line.find("loss") == std::string::npos) {
      continue;
    }
    const int step = std::atoi(line.c_str() + at + 5);
    const auto [known, is_new] = result.try_emplace(step, line.substr(at));
    EXPECT_EQ(known->second, line.substr(at)) << log;
  }
  return result;
}

/// A job that is put back into the queue in the middle resumes from its newest
/// checkpoint, and prints the same as a job that was not interrupted.
TEST_F(SlurmTest, TheDocumentedScriptResumesAfterARequeue) {
  const std::string script = documented_script();
  ASSERT_FALSE(script.empty());
  const std::string program = bin_dir() + "/after";
  write_script("train.sbatch", script);
  write_script("train", "#!/bin/sh\nexec stdbuf -oL " + program + " 1000000\n");
  const fs::path alone = cluster_->work() / "alone";
  fs::create_directory(alone);
  const auto reference = run_command(
      {"sh",
       "-c",
       "cd \"$0\" && exec \"$@\"",
       alone.string(),
       tessera_program(),
       "run",
       "-n",
       "4",
       program,
       "200"},
      {.environment = launchers_environment(),
       .timeout = std::chrono::seconds(300)});
  ASSERT_EQ(reference.exit_code, 0) << reference.output;

  const auto submitted = cluster_->run(
      {"env",
       "PATH=" + bin_dir() + ":" + *launchers_environment()["PATH"],
       "sbatch",
       "--parsable",
       "train.sbatch"});
  ASSERT_EQ(submitted.exit_code, 0) << submitted.output;
  const std::string id =
      submitted.output.substr(0, submitted.output.find('\n'));
  const auto log = [&] {
    return read_text(cluster_->work() / ("train-" + id + ".log"));
  };
  ASSERT_TRUE(wait_until([&] { return losses(log()).contains(160); })) << log();
  const auto requeued = cluster_->run({"scontrol", "requeue", id});
  ASSERT_EQ(requeued.exit_code, 0) << requeued.output;
  ASSERT_TRUE(wait_until([&] {
    return cluster_->run({"squeue", "-h", "-o", "%t", "-j", id}).output ==
        "PD\n";
  }));
  const int before = losses(log()).rbegin()->first;
  // Slurm waits two minutes before a job starts again; nobody needs that here.
  cluster_->run({"scontrol", "update", "JobId=" + id, "StartTime=now"});
  ASSERT_TRUE(wait_until([&] {
    return losses(log()).rbegin()->first > before + 40;
  })) << log();
  cluster_->run({"scancel", id});
  // The job did not start from the beginning, and got the same numbers.
  EXPECT_EQ(num_times(log(), "step  20 "), 1) << log();
  const auto found = losses(log());
  for (const auto& [step, line] : losses(reference.output)) {
    EXPECT_EQ(found.at(step), line);
  }
}

} // namespace
} // namespace tessera
