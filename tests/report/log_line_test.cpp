#include "report/log_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "report/step_line.h"

namespace tessera::report {
namespace {

using ::testing::HasSubstr;

template <class T>
T parse(const std::string& text) {
  return std::get<T>(parse_line(text).content);
}

std::string problem_of(const std::string& text) {
  try {
    parse_line(text);
    return "none";
  } catch (const LineError& error) {
    return error.what();
  }
}

TEST(LogLineTest, ReadsAStep) {
  const std::string text =
      R"({"kind":"step","time":1763200000.5,"step":7,"loss":5.25,"lr":1e-4,)"
      R"("grad_norm":1.5,"tokens":2048,"seconds":0.25,"new":"x",)"
      R"("memory":{"shards":1,"full":2,"gradients":3,"optimizer":4,)"
      R"("activations":5,"other":6,"new":7}})";
  ASSERT_TRUE(parse_plain_step(text));
  const LogLine line = parse_line(text);
  const auto step = std::get<Step>(line.content);
  EXPECT_EQ(line.time, 1763200000.5);
  EXPECT_EQ(step.step, 7);
  EXPECT_EQ(step.loss, 5.25);
  EXPECT_EQ(step.lr, 1e-4);
  EXPECT_EQ(step.grad_norm, 1.5);
  EXPECT_EQ(step.tokens, 2048);
  EXPECT_EQ(step.seconds, 0.25);
  EXPECT_EQ(step.memory_total(), 21);
  EXPECT_EQ(step.memory[4], 5);
  EXPECT_EQ(step.has, 63);
}

TEST(LogLineTest, ReadsThatAStepWasSkipped) {
  const std::string prefix = R"({"kind":"step","step":1,"loss_scale":65536)";
  EXPECT_TRUE(parse<Step>(prefix + R"(,"skipped":true})").is_skipped);
  EXPECT_FALSE(parse<Step>(prefix + R"(,"skipped":false})").is_skipped);
  EXPECT_FALSE(parse<Step>(prefix + "}").is_skipped);
  for (const char* value : {"1", R"("yes")"}) {
    EXPECT_EQ(
        problem_of(prefix + R"(,"skipped":)" + value + "}"),
        "\"skipped\" is not true or false");
  }
}

TEST(LogLineTest, ReadsLossesThatAreNoNumbers) {
  for (const std::string prefix :
       {R"({"kind":"step","step":1,)", R"({"kind":"step","step":1,"x":[],)"}) {
    EXPECT_TRUE(std::isnan(parse<Step>(prefix + R"("loss":"nan"})").loss));
    EXPECT_EQ(parse<Step>(prefix + R"("loss":"inf"})").loss, INFINITY);
    EXPECT_EQ(parse<Step>(prefix + R"("loss":"-inf"})").loss, -INFINITY);
    EXPECT_EQ(parse<Step>(prefix + R"("loss":null})").has, 0);
  }
}

// "x":[1] is enough for a line not to be plain.
TEST(LogLineTest, PlainAndOtherStepLinesMeanTheSame) {
  for (const std::string members :
       {R"("step":1)",
        R"("step":12345678901,"loss":-0.0)",
        R"("step":0,"loss":1e-300,"lr":0.1,"tokens":0)",
        R"( "step" : 3 , "loss" : 2.5E+2 , "name" : "a b" )",
        R"("step":3,"lr":"nan","memory":{})",
        R"("step":3,"memory":{"full":1e9,"x":2},"seconds":0.3333333333333333)",
        R"("loss":1,"grad_norm":-3,"step":3,"loss":2,"time":12.5)"}) {
    const auto plain = parse_plain_step("{\"kind\":\"step\"," + members + "}");
    ASSERT_TRUE(plain) << members;
    const std::string other = "{" + members + ",\"kind\":\"step\",\"x\":[1]}";
    ASSERT_FALSE(parse_plain_step(other));
    const auto expected = parse<Step>(other);
    const auto found = std::get<Step>(plain->content);
    EXPECT_EQ(plain->time, parse_line(other).time) << members;
    EXPECT_EQ(found.step, expected.step) << members;
    EXPECT_EQ(found.loss, expected.loss) << members;
    EXPECT_EQ(found.grad_norm, expected.grad_norm) << members;
    EXPECT_EQ(found.seconds, expected.seconds) << members;
    EXPECT_EQ(found.memory, expected.memory) << members;
    EXPECT_EQ(found.has, expected.has) << members;
  }
}

TEST(LogLineTest, RejectsStepsByNameOfTheField) {
  const auto problem = [](const std::string& members) {
    return problem_of("{\"kind\":\"step\"," + members + "}");
  };
  EXPECT_EQ(problem(R"("loss":1)"), "\"step\" is missing");
  EXPECT_EQ(problem(R"("step":1.5)"), "\"step\" is not a count");
  EXPECT_EQ(problem(R"("step":-1)"), "\"step\" is out of bounds");
  EXPECT_EQ(problem(R"("step":"1")"), "\"step\" is not a count");
  EXPECT_EQ(problem(R"("step":1e30)"), "\"step\" is not a count");
  EXPECT_EQ(
      problem(R"("step":99999999999999999)"), "\"step\" is out of bounds");
  EXPECT_EQ(problem(R"("step":1,"loss":"big")"), "\"loss\" is not a number");
  EXPECT_EQ(problem(R"("step":1,"loss":true)"), "\"loss\" is not a number");
  EXPECT_EQ(problem(R"("step":1,"loss":{"a":1})"), "\"loss\" is not a number");
  EXPECT_EQ(problem(R"("step":1,"tokens":-1)"), "\"tokens\" is out of bounds");
  EXPECT_EQ(
      problem(R"("step":1,"seconds":"inf")"), "\"seconds\" is not a number");
  EXPECT_EQ(problem(R"("step":1,"time":1e300)"), "\"time\" is out of bounds");
  EXPECT_EQ(problem(R"("step":1,"memory":5)"), "\"memory\" is not an object");
  EXPECT_EQ(
      problem(R"("step":1,"memory":{"full":-1})"), "\"full\" is out of bounds");
}

TEST(LogLineTest, RejectsWhatIsNoJson) {
  for (const std::string text :
       {R"({"kind":"step","step":1)",
        R"({"kind":"step","step":01})",
        R"({"kind":"step","step":1.})",
        R"({"kind":"step","step":.5})",
        R"({"kind":"step","step":+5})",
        R"({"kind":"step","step":1,"loss":nan})",
        R"({"kind":"step","step":1,"loss":1e})",
        R"({"kind":"step","step":1,"loss":1e999})",
        R"({"kind":"step","step":1}})",
        R"({"kind":"step","step":1,})",
        R"({"kind":"step" "step":1})",
        "{\"kind\":\"step\",\"step\":1,\"x\":\"\x80\"}",
        "{\"kind\":\"step\",\"step\":1,\"x\":\"\x01\"}"}) {
    EXPECT_EQ(problem_of(text), "is not JSON") << text;
  }
  EXPECT_EQ(problem_of("[1]"), "is not an object");
  EXPECT_EQ(problem_of("{}"), "\"kind\" is missing");
  EXPECT_EQ(problem_of(R"({"kind":7})"), "\"kind\" is not a text");
}

TEST(LogLineTest, ReadsAStart) {
  const auto start = parse<StartLine>(
      R"({"kind":"start","time":5,"format":1,"attempt":2,"step":40,"world":4,)"
      R"("device":"cuda","name":"demo","versions":{"tessera":"0.1.0"},)"
      R"("host":"h","config":{"b":{"c":[1,2],"d":"x"},"a":true,"e":{}},)"
      R"("units":[{"name":"blocks.0","parameters":123,"full_bytes":492,)"
      R"("shard_bytes":246}]})");
  EXPECT_EQ(start.attempt.number, 2);
  EXPECT_EQ(start.attempt.start_step, 40);
  EXPECT_EQ(start.attempt.world, 4);
  EXPECT_EQ(start.attempt.device, "cuda");
  EXPECT_EQ(start.attempt.versions[0].second, "0.1.0");
  ASSERT_EQ(start.units.size(), 1U);
  EXPECT_EQ(start.units[0].name, "blocks.0");
  EXPECT_EQ(start.units[0].shard_bytes, 246);
  const decltype(start.config) expected{
      {"a", "true"}, {"b.c", "[1,2]"}, {"b.d", "x"}, {"e", "{}"}};
  EXPECT_EQ(start.config, expected);
}

TEST(LogLineTest, ReadsATimelineAndLeavesUnknownLanesOut) {
  const auto timeline = parse<Timeline>(
      R"({"kind":"timeline","step":10,"ranks":[{"rank":3,"spans":[)"
      R"({"lane":"compute","name":"a","start":0,"end":0.5},)"
      R"({"lane":"dreaming","name":"b","start":0,"end":0.5},)"
      R"({"lane":"wait","name":"c","start":0.5,"end":0.75}]}]})");
  ASSERT_EQ(timeline.ranks.size(), 1U);
  EXPECT_EQ(timeline.ranks[0].rank, 3);
  ASSERT_EQ(timeline.ranks[0].spans.size(), 2U);
  EXPECT_EQ(timeline.ranks[0].spans[1].lane, 3U);
  EXPECT_EQ(timeline.ranks[0].spans[1].end, 0.75);
}

TEST(LogLineTest, RejectsOtherKindsByNameOfTheField) {
  EXPECT_EQ(problem_of(R"({"kind":"eval","step":1})"), "\"loss\" is missing");
  EXPECT_EQ(
      problem_of(R"({"kind":"start","world":"two"})"),
      "\"world\" is not a count");
  EXPECT_EQ(
      problem_of(R"({"kind":"start","units":[1]})"),
      "\"units\" has an element that is not an object");
  EXPECT_THAT(problem_of(R"({"kind":"start","format":2})"), HasSubstr("newer"));
  EXPECT_EQ(
      problem_of(R"({"kind":"sample","step":1,"text":[]})"),
      "\"text\" is not a text");
  EXPECT_EQ(
      problem_of(R"({"kind":"timeline","step":1,"ranks":[{"rank":0,"spans":[)"
                 R"({"lane":"wait","start":2,"end":1}]}]})"),
      "\"end\" of a span is before its start");
}

TEST(LogLineTest, IgnoresUnknownKinds) {
  EXPECT_TRUE(std::holds_alternative<OtherLine>(
      parse_line(R"({"kind":"weather","step":"x"})").content));
}

TEST(LogLineTest, SurvivesDepth) {
  const std::string deep(1000000, '[');
  EXPECT_THAT(
      problem_of("{\"kind\":\"start\",\"config\":" + deep),
      HasSubstr("nested deeper"));
  const std::string back(1000000, ']');
  EXPECT_THAT(
      problem_of("{\"kind\":\"start\",\"config\":" + deep + back + "}"),
      HasSubstr("nested deeper"));
}

TEST(LogLineTest, CutsLongTextsBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 3000; ++i) {
    text += "\xC3\xBC";
  }
  const auto sample = parse<Sample>(
      R"({"kind":"sample","step":1,"prompt":"p","text":"x)" + text + "\"}");
  EXPECT_EQ(sample.text.size(), 1 + 2 * 1999 + 3U);
  EXPECT_EQ(sample.text.substr(sample.text.size() - 5), "\xC3\xBC...");
}

} // namespace
} // namespace tessera::report
