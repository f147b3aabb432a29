#include "launch/verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::launch {
namespace {

using testing::HasSubstr;

NodeReport report(Ending ending, int exit_code, int64_t time_us) {
  return NodeReport{
      .ending = ending,
      .exit_code = exit_code,
      .may_restart = ending != Ending::Interrupted && ending != Ending::Error,
      .time_us = time_us,
      .text = "at " + std::to_string(time_us)};
}

const NodeReport kGood = report(Ending::Succeeded, 0, 0);
const NodeReport kStopped = report(Ending::Stopped, 1, 1);

TEST(VerdictTest, SuccessEverywhereIsDone) {
  const Verdict verdict = decide(std::vector{kGood, kGood}, 0, 3);
  EXPECT_EQ(verdict.action, Action::Done);
  EXPECT_EQ(verdict.exit_code, 0);
}

TEST(VerdictTest, EarliestCauseWins) {
  const std::vector reports{
      report(Ending::Failed, 5, 300), kStopped, report(Ending::Failed, 9, 200)};
  const Verdict verdict = decide(reports, 0, 0);
  EXPECT_EQ(verdict.action, Action::Fail);
  EXPECT_EQ(verdict.exit_code, 9);
  EXPECT_EQ(verdict.node_rank, 2);
  EXPECT_EQ(verdict.text, "at 200");
}

TEST(VerdictTest, FailureRestartsWhileRestartsAreLeft) {
  const std::vector reports{report(Ending::Failed, 5, 300), kStopped};
  EXPECT_EQ(decide(reports, 0, 2).action, Action::Restart);
  EXPECT_EQ(decide(reports, 1, 2).action, Action::Restart);
  EXPECT_EQ(decide(reports, 2, 2).action, Action::Fail);
}

TEST(VerdictTest, InterruptAfterAFailureForbidsTheRestart) {
  const std::vector reports{
      report(Ending::Failed, 5, 300), report(Ending::Interrupted, 130, 400)};
  const Verdict verdict = decide(reports, 0, 2);
  EXPECT_EQ(verdict.action, Action::Fail);
  EXPECT_EQ(verdict.exit_code, 5);
}

TEST(VerdictTest, LostNodeIsNamedBesideTheCause) {
  const std::vector reports{
      report(Ending::Failed, 5, 300), report(Ending::Error, 1, 400)};
  EXPECT_THAT(decide(reports, 0, 2).text, HasSubstr("\n  node 1: at 400"));
}

TEST(VerdictTest, ErrorOfALauncherNamesItsNode) {
  const NodeReport error = report(Ending::Error, 127, 300);
  EXPECT_EQ(decide(std::vector{kStopped, error}, 0, 2).text, "node 1: at 300");
  EXPECT_EQ(decide(std::vector{error}, 0, 2).text, "at 300");
}

TEST(VerdictTest, StopWithoutACauseStillFails) {
  const Verdict verdict = decide(std::vector{kGood, kStopped}, 0, 2);
  EXPECT_EQ(verdict.action, Action::Fail);
  EXPECT_EQ(verdict.exit_code, 1);
}

TEST(VerdictTest, MessagesRoundTrip) {
  NodeReport sent = report(Ending::Failed, 139, 1234567890123456);
  sent.text = std::string("3:a\nb\0c", 7);
  const NodeReport received = decode_report(encode(sent));
  EXPECT_EQ(received.ending, sent.ending);
  EXPECT_EQ(received.exit_code, sent.exit_code);
  EXPECT_EQ(received.may_restart, sent.may_restart);
  EXPECT_EQ(received.time_us, sent.time_us);
  EXPECT_EQ(received.text, sent.text);

  const Verdict verdict{
      .action = Action::Restart, .exit_code = 7, .node_rank = 3, .text = "x"};
  const Verdict same = decode_verdict(encode(verdict));
  EXPECT_EQ(same.action, verdict.action);
  EXPECT_EQ(same.exit_code, verdict.exit_code);
  EXPECT_EQ(same.node_rank, verdict.node_rank);
  EXPECT_EQ(same.text, verdict.text);
}

TEST(VerdictTest, RejectsMessagesThatAreCutOrForeign) {
  const std::string bytes = encode(report(Ending::Failed, 1, 5));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(decode_report(bytes.substr(0, size)), std::runtime_error)
        << size;
  }
  EXPECT_THROW(decode_report("99999999999999999999:"), std::runtime_error);
  EXPECT_THROW(decode_report("-1:"), std::runtime_error);
  EXPECT_THROW(decode_report(bytes + "1:x"), std::runtime_error);
}

} // namespace
} // namespace tessera::launch
