#include "comm/environment.h"

#include <c10/util/Exception.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Environment read(const Variables& variables) {
  return read_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string error_of(const Variables& variables) {
  try {
    read(variables);
  } catch (const c10::ValueError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(EnvironmentTest, AloneWithoutALauncher) {
  const Environment environment = read({});
  EXPECT_EQ(environment.launcher, "none");
  EXPECT_EQ(environment.rank, 0);
  EXPECT_EQ(environment.world_size, 1);
}

TEST(EnvironmentTest, ReadsTorchrun) {
  const Environment environment = read(
      {{"RANK", "5"},
       {"WORLD_SIZE", "8"},
       {"LOCAL_RANK", "1"},
       {"LOCAL_WORLD_SIZE", "4"},
       {"MASTER_ADDR", "node0"},
       {"MASTER_PORT", "29500"},
       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
       {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(environment.launcher, "torchrun");
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.world_size, 8);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.master_addr, "node0");
  EXPECT_EQ(environment.master_port, 29500);
  EXPECT_TRUE(environment.store_is_hosted);
  EXPECT_EQ(environment.restart_count, 2);
  EXPECT_FALSE(environment.one_host);
}

TEST(EnvironmentTest, ReadsOpenMpi) {
  const Environment environment = read(
      {{"OMPI_COMM_WORLD_RANK", "1"},
       {"OMPI_COMM_WORLD_SIZE", "4"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
       {"PMIX_NAMESPACE", "job17"}});
  EXPECT_EQ(environment.launcher, "OpenMPI");
  EXPECT_EQ(environment.rank, 1);
  EXPECT_EQ(environment.job_id, "job17");
  EXPECT_TRUE(environment.one_host);
  EXPECT_FALSE(environment.store_is_hosted);
}

TEST(EnvironmentTest, ReadsASlurmStep) {
  const Environment environment = read(
      {{"SLURM_PROCID", "3"},
       {"SLURM_NTASKS", "6"},
       {"SLURM_LOCALID", "0"},
       {"SLURM_NNODES", "2"},
       {"SLURM_JOB_ID", "99"},
       {"SLURM_STEP_ID", "0"}});
  EXPECT_EQ(environment.launcher, "Slurm");
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.world_size, 6);
  EXPECT_EQ(environment.job_id, "99.0");
  EXPECT_FALSE(environment.one_host);
}

TEST(EnvironmentTest, ASlurmBatchScriptIsAlone) {
  EXPECT_EQ(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "6"}}).world_size, 1);
}

/// A batch script and the shell of salloc have a job and no step.
TEST(EnvironmentTest, OtherLaunchersInsideASlurmAllocationHaveTheirOwnJob) {
  const Variables allocation{
      {"SLURM_JOB_ID", "1"},
      {"SLURM_NTASKS", "4"},
      {"SLURM_PROCID", "0"},
      {"SLURM_NNODES", "1"}};
  const auto inside = [&](Variables variables) {
    variables.insert(allocation.begin(), allocation.end());
    return read(variables);
  };
  EXPECT_EQ(inside({}).world_size, 1);

  const Environment torchrun = inside({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(torchrun.launcher, "torchrun");
  EXPECT_EQ(torchrun.rank, 1);
  EXPECT_EQ(torchrun.job_id, "");

  const Environment mpirun = inside(
      {{"OMPI_COMM_WORLD_RANK", "1"},
       {"OMPI_COMM_WORLD_SIZE", "2"},
       {"PMIX_NAMESPACE", "job17"}});
  EXPECT_EQ(mpirun.rank, 1);
  EXPECT_EQ(mpirun.job_id, "job17");

  const Environment pmi = inside({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  EXPECT_EQ(pmi.launcher, "PMI");
  EXPECT_EQ(pmi.rank, 1);
  EXPECT_EQ(pmi.job_id, "");
}

/// MPICH starts its helpers with srun, one on each node, and their ranks have
/// the variables of that step.
TEST(EnvironmentTest, MpichInsideASlurmAllocationIsNotTheStepOfItsHelpers) {
  const Environment environment = read(
      {{"PMI_RANK", "1"},
       {"PMI_SIZE", "2"},
       {"PMI_FD", "6"},
       {"MPI_LOCALRANKID", "1"},
       {"MPI_LOCALNRANKS", "2"},
       {"SLURM_JOB_ID", "3"},
       {"SLURM_STEP_ID", "0"},
       {"SLURM_PROCID", "0"},
       {"SLURM_LOCALID", "0"},
       {"SLURM_NTASKS", "4"},
       {"SLURM_NNODES", "1"}});
  EXPECT_EQ(environment.launcher, "PMI");
  EXPECT_EQ(environment.rank, 1);
  EXPECT_EQ(environment.world_size, 2);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.job_id, "");
  EXPECT_TRUE(environment.one_host);
}

TEST(EnvironmentTest, TasksOfSrunWithPmiAreSlurms) {
  const Environment environment = read(
      {{"PMI_RANK", "3"},
       {"PMI_SIZE", "4"},
       {"PMI_JOBID", "2.0"},
       {"SLURM_JOB_ID", "2"},
       {"SLURM_STEP_ID", "0"},
       {"SLURM_PROCID", "3"},
       {"SLURM_LOCALID", "1"},
       {"SLURM_NTASKS", "4"},
       {"SLURM_NNODES", "2"},
       {"SLURM_RESTART_COUNT", "1"}});
  EXPECT_EQ(environment.launcher, "Slurm");
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.job_id, "2.0.1");
  EXPECT_FALSE(environment.one_host);
}

/// The step of salloc's shell, whose tasks srun starts later.
TEST(EnvironmentTest, TheInteractiveStepOfSlurmIsAlone) {
  const Environment environment = read(
      {{"SLURM_JOB_ID", "7"},
       {"SLURM_STEP_ID", "4294967290"},
       {"SLURM_PROCID", "0"},
       {"SLURM_NTASKS", "4"}});
  EXPECT_EQ(environment.launcher, "none");
  EXPECT_EQ(environment.world_size, 1);
}

TEST(EnvironmentTest, PmiOnSeveralHostsOrWithoutAWordOnThemIsNotOneHost) {
  const Variables pmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}};
  EXPECT_FALSE(read(pmi).one_host);
  Variables two_hosts = pmi;
  two_hosts["MPI_LOCALNRANKS"] = "2";
  EXPECT_FALSE(read(two_hosts).one_host);
  Variables one_host = pmi;
  one_host["MPI_LOCALNRANKS"] = "4";
  EXPECT_TRUE(read(one_host).one_host);
}

TEST(EnvironmentTest, ReadsPmi) {
  const Environment environment =
      read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "h"}});
  EXPECT_EQ(environment.launcher, "PMI");
  EXPECT_EQ(environment.rank, 1);
}

TEST(EnvironmentTest, RankWinsOverMpi) {
  EXPECT_EQ(
      read({{"RANK", "0"},
            {"WORLD_SIZE", "2"},
            {"OMPI_COMM_WORLD_RANK", "1"},
            {"OMPI_COMM_WORLD_SIZE", "4"}})
          .world_size,
      2);
}

TEST(EnvironmentTest, RejectsWhatIsNotANumber) {
  const std::string text = error_of({{"RANK", "two"}, {"WORLD_SIZE", "4"}});
  EXPECT_THAT(text, HasSubstr("RANK=\"two\" is not a whole number"));
  EXPECT_THAT(text, HasSubstr("tessera run"));
  EXPECT_THAT(
      error_of({{"RANK", "1x"}, {"WORLD_SIZE", "4"}}),
      HasSubstr("RANK=\"1x\""));
}

TEST(EnvironmentTest, RejectsARankOutsideTheWorld) {
  EXPECT_THAT(
      error_of({{"RANK", "4"}, {"WORLD_SIZE", "4"}}),
      HasSubstr("RANK=4 but WORLD_SIZE=4: ranks count from 0 to 3"));
  EXPECT_THAT(
      error_of({{"RANK", "-1"}, {"WORLD_SIZE", "4"}}), HasSubstr("RANK=-1"));
  EXPECT_THAT(
      error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}),
      HasSubstr("WORLD_SIZE=0"));
}

TEST(EnvironmentTest, RejectsHalfAPlace) {
  EXPECT_THAT(
      error_of({{"RANK", "1"}}),
      HasSubstr("RANK is set but WORLD_SIZE is not"));
  EXPECT_THAT(
      error_of({{"WORLD_SIZE", "4"}}),
      HasSubstr("WORLD_SIZE is set but RANK is not"));
}

} // namespace
} // namespace tessera::comm
