#include <nlohmann/json.hpp>

#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

using Environment = std::map<std::string, std::optional<std::string>>;

CommandResult doctor(const Environment& environment = {}) {
  return run_command(
      {tessera_program(), "doctor"}, {.environment = environment});
}

/// The environment of a job of four tasks, with `variables` set as well.
Environment under_slurm(const Environment& variables) {
  auto environment = without_launcher();
  environment["SLURM_JOB_ID"] = "1";
  environment["SLURM_NTASKS"] = "4";
  for (const auto& [name, value] : variables) {
    environment[name] = value;
  }
  return environment;
}

TEST(DoctorTest, SaysWhatIsThereAndThatItWorks) {
  const auto result = doctor();
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("LibTorch"),
          HasSubstr("neighbours    other users are kept out (by sock_diag)"),
          HasSubstr("rendezvous    ok"),
          HasSubstr("gloo          ok"),
          HasSubstr("shm           ok")));
}

/// `doctor` starts ranks in its own environment, so that a setting that makes
/// ranks crash there is not reported as ok.
TEST(DoctorTest, TellsWhetherRanksStartHere) {
  auto environment = under_slurm({});
  auto result = doctor(environment);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("environment   ok: a program is alone here"),
          HasSubstr("launch        ok")));

  environment["TESSERA_TIMEOUT"] = "soon";
  result = doctor(environment);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("launch        FAILS"),
          HasSubstr("TESSERA_TIMEOUT=\"soon\" is not a number of seconds"),
          HasSubstr("1 of 5 checks failed")));
}

TEST(DoctorTest, SaysTheSameAsJson) {
  const auto json_of = [](const Environment& environment) {
    return nlohmann::json::parse(run_command(
                                     {tessera_program(), "doctor", "--json"},
                                     {.environment = environment})
                                     .output);
  };
  auto environment = under_slurm({});
  auto json = json_of(environment);
  EXPECT_TRUE(json.at("all_is_well").get<bool>());
  EXPECT_GE(json.at("cores").get<int>(), 1);
  EXPECT_EQ(json.at("checks").size(), 5);

  environment["TESSERA_TIMEOUT"] = "soon";
  json = json_of(environment);
  EXPECT_FALSE(json.at("all_is_well").get<bool>());
  const auto& launch = json.at("checks").back();
  EXPECT_EQ(launch.at("name"), "launch");
  EXPECT_FALSE(launch.at("works").get<bool>());
  EXPECT_THAT(
      launch.at("text").get<std::string>(), HasSubstr("is not a number"));
  EXPECT_THAT(launch.at("fix").get<std::string>(), HasSubstr("tessera run"));
}

TEST(DoctorTest, TellsThePlaceThatALauncherGives) {
  auto environment =
      under_slurm({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "3"}});
  auto result = doctor(environment);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      HasSubstr("a program is rank 3 of 4 here, by the variables of Slurm"));

  environment["SLURM_PROCID"] = "4";
  result = doctor(environment);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("environment   FAILS"), HasSubstr("SLURM_PROCID=4")));
}

TEST(DoctorTest, SaysWhereUsersCannotBeToldApart) {
  const std::vector<std::string> alone{"unshare", "--user", "--map-root-user"};
  std::vector<std::string> words = alone;
  words.push_back("true");
  if (const auto trial = run_command(words); trial.exit_code != 0) {
    GTEST_SKIP() << "namespaces cannot be made here: " << trial.output;
  }
  words = alone;
  words.insert(words.end(), {tessera_program(), "doctor"});
  const auto result = run_command(words);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("other users of this user namespace are kept out"),
          HasSubstr("those outside of it are let in with a warning"),
          HasSubstr("TESSERA_STORE_SECRET")));
}

TEST(CommandLineTest, UnknownWordsAreRefused) {
  EXPECT_NE(run_command({tessera_program()}).exit_code, 0);
  EXPECT_NE(run_command({tessera_program(), "fly"}).exit_code, 0);
  EXPECT_THAT(
      run_command({tessera_program(), "--version"}).output,
      HasSubstr("tessera 0."));
}

} // namespace
} // namespace tessera
