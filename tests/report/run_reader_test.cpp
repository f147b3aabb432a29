#include "report/run_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/report_error.h"
#include "report/summary.h"
#include "report/support.h"

namespace tessera::report {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
    return "none";
  } catch (const ReportError& error) {
    return error.what();
  }
}

TEST(RunReaderTest, StepsRunAgainReplaceTheEarlierOnes) {
  const auto run = read_text(
      start_line(0, 0, 2) + step_lines(0, 60) +
      R"({"kind":"eval","step":40,"loss":4})" +
      "\n"
      R"({"kind":"eval","step":50,"loss":5})" +
      "\n" + start_line(1, 40, 4) +
      R"({"kind":"resume","step":40,"path":"c"})" + "\n" +
      step_lines(40, 45, 1000));
  ASSERT_THAT(run.steps, SizeIs(45));
  EXPECT_EQ(run.steps[39].loss, 40);
  EXPECT_EQ(run.steps[40].loss, 1041);
  ASSERT_THAT(run.superseded, SizeIs(1));
  ASSERT_THAT(run.superseded[0].steps, SizeIs(20));
  EXPECT_EQ(run.superseded[0].steps.front().step, 41);
  EXPECT_EQ(run.superseded[0].steps.back().loss, 60);
  ASSERT_THAT(run.evals, SizeIs(1));
  EXPECT_EQ(run.evals[0].step, 40);
  ASSERT_THAT(run.superseded[0].evals, SizeIs(1));

  const Summary summary = summarize(run);
  EXPECT_EQ(summary.final_loss, 1045);
  EXPECT_EQ(summary.last_step, 45);
  EXPECT_EQ(summary.num_repeated, 20);
  EXPECT_THAT(summary.worlds, ElementsAre(2, 4));
  EXPECT_EQ(summary.state, "no end");
  EXPECT_EQ(run.attempts[1].resumed_step, 40);
  EXPECT_EQ(run.attempts[0].last_step, 60);
}

TEST(RunReaderTest, StepsThatWereSkippedAreCounted) {
  const auto run = read_text(
      start_line(0) + step_lines(0, 3) +
      R"({"kind":"step","step":4,"loss":2,"skipped":true})" + "\n" +
      R"({"kind":"step","step":5,"loss":2})" + "\n");
  EXPECT_EQ(summarize(run).num_skipped, 1);
  EXPECT_THAT(
      summary_text(run),
      HasSubstr("; 1 step skipped, whose gradients overflowed"));
}

TEST(RunReaderTest, AnAttemptThatRanNoStepReplacesNothing) {
  const auto run =
      read_text(start_line(0) + step_lines(0, 10) + start_line(1, 5));
  EXPECT_THAT(run.steps, SizeIs(10));
  EXPECT_THAT(run.superseded, IsEmpty());
}

TEST(RunReaderTest, ThreeAttemptsLeaveTheNewestLine) {
  const auto run = read_text(
      start_line(0) + step_lines(0, 10) + start_line(1) +
      step_lines(5, 8, 100) + start_line(2) + step_lines(2, 12, 200));
  ASSERT_THAT(run.steps, SizeIs(12));
  EXPECT_EQ(run.steps[1].loss, 2);
  EXPECT_EQ(run.steps[2].loss, 203);
  ASSERT_THAT(run.superseded, SizeIs(2));
  EXPECT_THAT(run.superseded[0].steps, SizeIs(5)); // 6 to 10
  EXPECT_THAT(run.superseded[1].steps, SizeIs(6)); // 3 to 5, 6 to 8
}

TEST(RunReaderTest, ATornLastLineIsNoProblem) {
  const auto run =
      read_text(start_line() + step_lines(0, 3) + R"({"kind":"step","st)");
  EXPECT_EQ(run.num_torn, 1);
  EXPECT_EQ(run.num_problems, 0);
  EXPECT_THAT(run.steps, SizeIs(3));
}

TEST(RunReaderTest, ATornLineBeforeARestartIsNoProblem) {
  const std::string torn = R"({"kind":"step","step":4,"lo)";
  for (const std::string gap : {"\n", ""}) {
    const auto run = read_text(
        start_line() + step_lines(0, 3) + torn + gap +
        R"({"kind":"start","world":4})" + "\n" + step_lines(3, 5));
    EXPECT_EQ(run.num_torn, 1);
    EXPECT_EQ(run.num_problems, 0);
    EXPECT_EQ(run.num_lines, gap.empty() ? 7 : 8);
    EXPECT_THAT(run.attempts, SizeIs(2));
    EXPECT_THAT(run.steps, SizeIs(5));
  }
}

TEST(RunReaderTest, AWholeLineThatIsWrongIsAProblemAlsoBeforeARestart) {
  const std::string wrong = R"({"kind":"step","step":-1})";
  EXPECT_EQ(
      read_text(start_line() + wrong + "\n" + start_line(1)).num_problems, 1);
  EXPECT_EQ(read_text(start_line() + wrong).num_problems, 1);
  const auto run = read_text(start_line() + "x\ny\n" + start_line(1));
  EXPECT_EQ(run.num_problems, 1);
  EXPECT_EQ(run.num_torn, 1);
}

TEST(RunReaderTest, AWholeLastLineWithoutAnEndIsRead) {
  const auto run = read_text(start_line() + R"({"kind":"step","step":1})");
  EXPECT_THAT(run.steps, SizeIs(1));
  EXPECT_EQ(run.num_torn, 0);
}

TEST(RunReaderTest, NamesLinesThatCannotBeRead) {
  const auto run = read_text(
      start_line() + "garbage\n" + step_line(1, 3) + "\n  \r\n" +
      R"({"kind":"step","step":2,"loss":[]})" + "\n" + step_line(3, 3));
  EXPECT_EQ(run.num_problems, 2);
  EXPECT_EQ(run.num_torn, 0);
  ASSERT_THAT(run.problems, SizeIs(2));
  EXPECT_EQ(run.problems[0].line, 2);
  EXPECT_EQ(run.problems[0].what, "is not JSON");
  EXPECT_EQ(run.problems[1].line, 6);
  EXPECT_EQ(run.problems[1].what, "\"loss\" is not a number");
  EXPECT_THAT(run.steps, SizeIs(2));
  EXPECT_EQ(
      problems_text(run),
      "2 of 7 lines could not be read:\n"
      "  line 2 is not JSON\n"
      "  line 6 \"loss\" is not a number\n");
}

TEST(RunReaderTest, NamesAFewOfManyProblems) {
  std::string text = start_line();
  for (int i = 0; i < 1000; ++i) {
    text += "?\n";
  }
  const auto run = read_text(text + step_line(1, 1));
  EXPECT_EQ(run.num_problems, 1000);
  EXPECT_THAT(run.problems, SizeIs(20));
}

TEST(RunReaderTest, ALineThatIsTooLongIsSkipped) {
  const std::string text(17 << 20, 'x');
  const auto run = read_text(
      start_line() + R"({"kind":"sample","step":1,"text":")" + text + "\"}\n" +
      step_line(1, 1));
  ASSERT_THAT(run.problems, SizeIs(1));
  EXPECT_EQ(run.problems[0].what, "is longer than 16 MiB");
  EXPECT_THAT(run.steps, SizeIs(1));
}

TEST(RunReaderTest, ConfigSaysWhatAnEarlierAttemptHad) {
  const auto run = read_text(R"({"kind":"start","config":{"a":1,"b":2}})"
                             "\n"
                             R"({"kind":"start","config":{"a":1,"b":3,"c":4}})"
                             "\n");
  ASSERT_THAT(run.config, SizeIs(3));
  EXPECT_EQ(run.config[0].was, std::nullopt);
  EXPECT_EQ(run.config[1].was, "2");
  EXPECT_EQ(run.config[2].was, "(not set)");
}

TEST(RunReaderTest, TimeIsThatOfTheAttemptsWithoutTheGaps) {
  const auto run =
      read_text(R"({"kind":"start","time":100})"
                "\n"
                R"({"kind":"step","step":1,"time":110})"
                "\n"
                R"({"kind":"start","time":500})"
                "\n"
                R"({"kind":"end","step":1,"time":505,"reason":"stopped"})"
                "\n");
  EXPECT_EQ(summarize(run).seconds, 15);
  EXPECT_EQ(summarize(run).state, "stopped");
}

TEST(RunReaderTest, RejectsWhatIsNoLog) {
  const ScratchFolder folder;
  EXPECT_THAT(
      error_of([&] { read_run(folder / "log.jsonl"); }),
      HasSubstr("there is no \"" + (folder / "log.jsonl").string()));
  EXPECT_THAT(
      error_of([] { read_text(""); }), HasSubstr("no line of a training log"));
  EXPECT_THAT(
      error_of([] { read_text("hello\nworld\n"); }),
      AllOf(
          HasSubstr("2 lines, 2 of them not readable"), HasSubstr("line 2: ")));
}

TEST(RunReaderTest, AnEvaluationThatComesAgainReplacesTheEarlierOne) {
  const auto run = read_text(
      start_line() +
      R"({"kind":"eval","step":10,"loss":1})"
      "\n"
      R"({"kind":"eval","step":20,"loss":2})"
      "\n"
      R"({"kind":"eval","step":10,"loss":3})"
      "\n");
  ASSERT_THAT(run.evals, SizeIs(1));
  EXPECT_EQ(run.evals[0].loss, 3);
  ASSERT_THAT(run.superseded, SizeIs(1));
  EXPECT_THAT(run.superseded[0].evals, SizeIs(2));
}

TEST(RunReaderTest, ALongConfigSaysThatItIsCut) {
  nlohmann::json start{{"kind", "start"}};
  for (int i = 0; i < 501; ++i) {
    start["config"]["k" + std::to_string(i)] = i;
  }
  const auto run = read_text(start.dump());
  ASSERT_THAT(run.config, SizeIs(501));
  EXPECT_EQ(run.config.back().path, "...");
  start["config"].erase("k0");
  EXPECT_EQ(read_text(start.dump()).config.back().path, "k99");
}

TEST(SummaryTest, HasNothingThatATerminalObeys) {
  const auto run =
      read_text(R"({"kind":"start","name":"a\u001b[2Jb\n\u009bc\u00fc"})");
  EXPECT_THAT(summary_text(run), HasSubstr("a?[2Jb??c\xC3\xBC: no end"));
}

TEST(SummaryTest, TellsRestartsFromContinuations) {
  const std::string start = R"({"kind":"start","world":2})";
  const auto ended = [](const std::string& fields) {
    return R"({"kind":"end","step":1,)" + fields + "}\n";
  };
  const auto run = read_text(
      start + "\n" + ended(R"("reason":"finished")") + start +
      "\n" + // continued
      ended(R"("reason":"stopped")") + start + "\n" + // continued
      start + "\n" + // after a kill
      ended(R"("reason":"failed","error":"no\u001b luck")"));
  ASSERT_THAT(run.attempts, SizeIs(4));
  EXPECT_FALSE(run.attempts[0].is_continuation);
  EXPECT_TRUE(run.attempts[1].is_continuation);
  EXPECT_TRUE(run.attempts[2].is_continuation);
  EXPECT_FALSE(run.attempts[3].is_continuation);
  EXPECT_THAT(
      summary_text(run),
      AllOf(
          HasSubstr("run: failed after step 0, on 2 ranks\n  no? luck\n"),
          HasSubstr("1 restart, continued 2 times\n")));
}

TEST(RunReaderTest, AChangeOfTheConfigIsShownForGood) {
  const auto run = read_text(R"({"kind":"start","config":{"lr":1,"gone":5}})"
                             "\n"
                             R"({"kind":"start","config":{"lr":2,"new":7}})"
                             "\n"
                             R"({"kind":"start","config":{"lr":2,"new":7}})"
                             "\n");
  using Row = std::pair<std::string, std::string>;
  std::map<std::string, Row> rows;
  for (const auto& row : run.config) {
    rows[row.path] = {row.value, row.was.value_or("")};
  }
  EXPECT_EQ(rows["lr"], Row("2", "1"));
  EXPECT_EQ(rows["new"], Row("7", "(not set)"));
  EXPECT_EQ(rows["gone"], Row("(not set)", "5"));
  // However many there were.
  std::string text;
  for (int i = 0; i < 2000; ++i) {
    text += R"({"kind":"start","config":{"k)" + std::to_string(i) + "\":1}}\n";
  }
  EXPECT_EQ(read_text(text).config.size(), 600U);
}

TEST(SummaryTest, EvaluationsAloneAreToldToo) {
  const auto run = read_text(R"({"kind":"start"})"
                             "\n"
                             R"({"kind":"eval","step":2,"loss":4})"
                             "\n");
  EXPECT_THAT(
      summary_text(run),
      HasSubstr("no losses in the log; best eval loss 4.0000"));
}

TEST(SummaryTest, IsFiveLines) {
  const auto run = read_text(
      R"({"kind":"start","time":100,"world":2,"name":"demo"})"
      "\n"
      R"({"kind":"step","step":1,"time":110,"loss":5,"tokens":2048,"seconds":0.5,"memory":{"full":1500000}})"
      "\n"
      R"({"kind":"step","step":2,"time":120,"loss":"nan","tokens":2048,"seconds":0.5})"
      "\n"
      R"({"kind":"eval","step":2,"time":120,"loss":4})"
      "\n"
      R"({"kind":"checkpoint","step":2,"time":121,"path":"c"})"
      "\n"
      R"({"kind":"end","step":2,"time":165,"reason":"finished"})"
      "\n");
  EXPECT_EQ(
      summary_text(run),
      "demo: finished after step 2, on 2 ranks\n"
      "  loss nan at step 2, from 5.0000; best eval loss 4.0000 at step 2\n"
      "  4,096 tokens in 1 min 05 s, 4,096 a second (median)\n"
      "  memory 1.5 MB per rank at its peak, step 1\n"
      "  1 checkpoint, the last at step 2; 0 restarts\n");
}

TEST(SummaryTest, CountsNoTokensWhereTheLogHasNone) {
  const auto run =
      read_text(R"({"kind":"start","time":100,"world":2,"name":"images"})"
                "\n"
                R"({"kind":"step","step":1,"time":110,"loss":5,"seconds":0.5})"
                "\n"
                R"({"kind":"end","step":1,"time":165,"reason":"finished"})"
                "\n");
  EXPECT_THAT(
      summary_text(run),
      ::testing::HasSubstr("\n  no tokens in the log; ran for 1 min 05 s\n"));
}

} // namespace
} // namespace tessera::report
