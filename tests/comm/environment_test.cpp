#include "comm/environment.h"

#include <c10/util/Exception.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace tessera::comm {
namespace {

using testing::HasSubstr;
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
