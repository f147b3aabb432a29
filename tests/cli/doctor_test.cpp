#include "support/command.h"

namespace tessera {
namespace {

using tessera::testing::run_command;
using tessera::testing::tessera_program;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DoctorTest, SaysWhatIsThereAndThatItWorks) {
  const auto result = run_command({tessera_program(), "doctor"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("LibTorch"),
          HasSubstr("rendezvous    ok"),
          HasSubstr("gloo          ok"),
          HasSubstr("shm           ok")));
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
