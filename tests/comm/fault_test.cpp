// What happens when a rank is missing, wrong, dead or elsewhere: nothing hangs
// past its timeout, and each survivor says who, what and what to do.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Ranks that exist must find each other within this time, on a busy machine
/// too.
constexpr int kTimeoutSeconds = 8;

/// A socket that holds a port of the loopback interface.
class Port {
 public:
  Port() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* raw = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(fd_, raw, length), 0);
    EXPECT_EQ(getsockname(fd_, raw, &length), 0);
    number_ = ntohs(address.sin_port);
  }
  ~Port() {
    release();
  }
  void listen_on_it() {
    EXPECT_EQ(listen(fd_, 8), 0);
  }
  void release() {
    close(std::exchange(fd_, -1));
  }
  int number() const {
    return number_;
  }

 private:
  int fd_ = -1;
  int number_ = 0;
};

/// Ranks of the probe that are started one by one, without a launcher that
/// would stop the others.
class ProbeRun {
 public:
  explicit ProbeRun(int world_size, std::vector<std::string> arguments)
      : world_size_(world_size), arguments_(std::move(arguments)) {
    port_.release(); // rank 0 takes it
  }

  ProbeRun& set(const std::string& name, const std::string& value) {
    extra_[name] = value;
    return *this;
  }

  void start(const std::string& rank) {
    CommandOptions options{
        .environment = without_launcher(), .timeout = std::chrono::minutes(4)};
    options.environment["RANK"] = rank;
    options.environment["WORLD_SIZE"] = std::to_string(world_size_);
    options.environment["MASTER_ADDR"] = "127.0.0.1";
    options.environment["MASTER_PORT"] = std::to_string(port_.number());
    options.environment["TESSERA_TIMEOUT"] = std::to_string(kTimeoutSeconds);
    options.environment["OMP_NUM_THREADS"] = "1";
    for (const auto& [name, value] : extra_) {
      options.environment[name] = value;
    }
    std::vector<std::string> words{bin_dir() + "/comm_probe"};
    words.insert(words.end(), arguments_.begin(), arguments_.end());
    commands_.push_back(std::make_unique<Command>(words, options));
  }
  void start_all() {
    for (int rank = 0; rank < world_size_; ++rank) {
      start(std::to_string(rank));
    }
  }

  /// The results of the first `count` ranks, or of all, in the order they were
  /// started.
  std::vector<CommandResult> wait(size_t count = 100) {
    std::vector<CommandResult> results;
    for (size_t i = 0; i < std::min(count, commands_.size()); ++i) {
      results.push_back(commands_[i]->wait());
      EXPECT_FALSE(results.back().timed_out) << results.back().output;
    }
    return results;
  }

 private:
  int world_size_;
  std::vector<std::string> arguments_;
  std::map<std::string, std::string> extra_;
  Port port_;
  std::vector<std::unique_ptr<Command>> commands_;
};

/// Every rank that was started ends with an error of these words.
void expect_all_to_fail(
    ProbeRun& run,
    const ::testing::Matcher<const std::string&>& words) {
  for (const auto& result : run.wait()) {
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_THAT(result.output, words);
  }
}

TEST(FaultTest, OneRankNeverJoinsIsNamedOnTheOthers) {
  ProbeRun run(3, {"all_reduce"});
  run.start("0");
  run.start("1");
  expect_all_to_fail(
      run,
      AllOf(
          HasSubstr("rank 2 of 3 never joined within 8.0 s"),
          HasSubstr("TESSERA_TIMEOUT")));
}

TEST(FaultTest, ARankThatIsNotANumberFailsEveryRank) {
  ProbeRun run(3, {"all_reduce"});
  run.start("0");
  run.start("two");
  run.start("1");
  expect_all_to_fail(run, HasSubstr("RANK=\"two\" is not a whole number"));
}

TEST(FaultTest, ARankOutsideTheWorldFailsEveryRank) {
  ProbeRun run(2, {"all_reduce"});
  run.start("0");
  run.start("2");
  expect_all_to_fail(
      run, HasSubstr("RANK=2 but WORLD_SIZE=2: ranks count from 0 to 1"));
}

TEST(FaultTest, TwoRanksWithTheSameNumberFailOnEveryRank) {
  ProbeRun run(3, {"all_reduce"});
  run.start("0");
  run.start("1");
  run.start("1");
  expect_all_to_fail(run, HasSubstr("two processes claim to be rank 1"));
}

TEST(FaultTest, WorldSizesThatDifferFailOnEveryRank) {
  ProbeRun run(2, {"all_reduce"});
  run.start("0");
  run.set("WORLD_SIZE", "3").start("1");
  expect_all_to_fail(run, HasSubstr("world size"));
}

TEST(FaultTest, SettingsThatDifferFailOnEveryRank) {
  ProbeRun run(2, {"all_reduce"});
  run.start("0");
  run.set("TESSERA_CHECK", "1").start("1");
  expect_all_to_fail(
      run,
      HasSubstr("rank 0 runs with backend=auto,TESSERA_CHECK=0, rank 1 with "
                "backend=auto,TESSERA_CHECK=1"));
}

TEST(FaultTest, ASettingThatMakesNoSenseFailsEveryRank) {
  ProbeRun run(2, {"all_reduce"});
  run.start("0");
  run.set("TESSERA_CHECK", "maybe").start("1");
  expect_all_to_fail(run, HasSubstr("TESSERA_CHECK=\"maybe\""));
}

TEST(FaultTest, SlotSizesThatDifferOrDoNotDivideAreHarmless) {
  ProbeRun run(2, {"all_reduce"});
  run.set("TESSERA_SHM_SLOT_BYTES", "5001").start("0");
  run.set("TESSERA_SHM_SLOT_BYTES", "65536").start("1");
  for (const auto& result : run.wait()) {
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("sum=3 world=2 backend=shm"));
  }
}

TEST(FaultTest, RanksMeetAgainAfterShutdown) {
  ProbeRun run(3, {"again"});
  run.start_all();
  for (const auto& result : run.wait()) {
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("sum=6 world=3"));
  }
}

TEST(FaultTest, TheEndOfAForkedChildIsNotTheRanks) {
  ProbeRun run(2, {"forks", "0", "shm"});
  run.start_all();
  for (const auto& result : run.wait()) {
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("sum=3 world=2"));
  }
}

TEST(FaultTest, AForkedChildThatReturnsFromMainDoesNotEndTheGroups) {
  for (const char* backend : {"shm", "gloo"}) {
    ProbeRun run(2, {"fork_returns", "0", backend});
    run.start_all();
    for (const auto& result : run.wait()) {
      EXPECT_EQ(result.exit_code, 0) << result.output;
      EXPECT_THAT(result.output, HasSubstr("sum=3 world=2"));
    }
  }
}

TEST(FaultTest, ATakenPortIsNamed) {
  Port taken;
  taken.listen_on_it();
  ProbeRun run(2, {"all_reduce"});
  run.set("MASTER_PORT", std::to_string(taken.number()));
  run.start("0");
  const auto results = run.wait();
  EXPECT_EQ(results[0].exit_code, 3);
  EXPECT_THAT(
      results[0].output,
      AllOf(
          HasSubstr(
              "cannot listen on 127.0.0.1:" + std::to_string(taken.number())),
          HasSubstr("choose another MASTER_PORT")));
}

TEST(FaultTest, APortThatIsNoStoreEndsAtTheTimeout) {
  Port taken;
  taken.listen_on_it();
  ProbeRun run(2, {"all_reduce"});
  run.set("MASTER_PORT", std::to_string(taken.number()));
  run.start("1");
  const auto results = run.wait();
  EXPECT_EQ(results[0].exit_code, 3);
  EXPECT_THAT(results[0].output, HasSubstr("no store answered"));
}

std::vector<std::string> shared_memory_files() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    names.push_back(entry.path());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// The faults that depend on what carries the data.
class BackendFaultTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<std::string> probe(const std::string& mode, int rank) const {
    return {mode, std::to_string(rank), GetParam()};
  }
  bool is_shm() const {
    return GetParam() == "shm";
  }
};

TEST_P(BackendFaultTest, ARankKilledInsideAnAllGatherIsNamed) {
  const auto before = shared_memory_files();
  ProbeRun run(3, probe("die", 1));
  run.start_all();
  const auto results = run.wait();
  EXPECT_EQ(results[1].exit_code, 128 + SIGKILL);
  for (int rank : {0, 2}) {
    const auto& result = results[static_cast<size_t>(rank)];
    EXPECT_EQ(result.exit_code, 3) << result.output;
    // Gloo does not always notice a death: then the timeout reports it, as
    // exactly.
    const std::string site =
        ": [all_gather_into] rank " + std::to_string(rank) + "/3: ";
    const auto lost = HasSubstr("ERROR peer lost" + site);
    const auto late = HasSubstr("ERROR timeout" + site);
    EXPECT_THAT(
        result.output,
        AllOf(
            AnyOf(lost, is_shm() ? lost : late),
            HasSubstr(is_shm() ? "rank 1 died" : ": rank 1 did not come"),
            HasSubstr("\"layers.0\"")));
  }
  EXPECT_EQ(shared_memory_files(), before);
}

TEST_P(BackendFaultTest, ShapesThatDifferAreShownOnEveryRank) {
  ProbeRun run(3, probe("shapes", 2));
  run.set("TESSERA_CHECK", is_shm() ? "0" : "1").start_all();
  expect_all_to_fail(
      run,
      AllOf(
          HasSubstr("ERROR disagreement: [all_reduce]"),
          HasSubstr("ranks 0, 1: all_reduce of Float [4] SUM"),
          HasSubstr("rank 2: all_reduce of Float [5] SUM"),
          HasSubstr("\"layers.3\"")));
}

/// Over Gloo as soon as they have waited for a while, with TESSERA_CHECK=1 at
/// once.
TEST_P(BackendFaultTest, DifferentOperatorsAreShownOnEveryRank) {
  for (const char* check : {"0", "1"}) {
    ProbeRun run(2, probe("operators", 1));
    run.set("TESSERA_CHECK", check).start_all();
    expect_all_to_fail(
        run,
        AllOf(
            HasSubstr("ERROR disagreement: "),
            HasSubstr("rank 0: broadcast of"),
            HasSubstr("rank 1: all_reduce of"),
            HasSubstr("the same collectives in the same order")));
  }
}

TEST_P(BackendFaultTest, ARankThatThrowsBeforeACollectiveIsNamed) {
  ProbeRun run(3, probe("throws", 0));
  run.start_all();
  const auto results = run.wait();
  EXPECT_THAT(results[0].output, HasSubstr("out of luck"));
  for (size_t rank : {1, 2}) {
    EXPECT_EQ(results[rank].exit_code, 3);
    EXPECT_THAT(
        results[rank].output,
        AllOf(
            HasSubstr(
                "ERROR peer lost: [all_reduce] rank " + std::to_string(rank) +
                "/3"),
            HasSubstr(is_shm() ? "rank 0 died" : "the store is gone too")));
  }
}

TEST_P(BackendFaultTest, ARankThatNeverComesIsNamedAtTheTimeout) {
  ProbeRun run(3, probe("skips", 2));
  run.start_all();
  for (const auto& result : run.wait(2)) { // rank 2 sleeps on
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_THAT(
        result.output,
        AllOf(
            HasSubstr("ERROR timeout: [all_reduce]"),
            HasSubstr("timed out after 8."),
            HasSubstr("rank 2 did not come")));
  }
}

/// Rank 0 names rank 1 first hand, rank 2 by what rank 0 said.
void expect_rank_1_to_be_named(
    const std::vector<CommandResult>& results,
    const std::string& call) {
  for (size_t rank : {0, 2}) {
    EXPECT_EQ(results[rank].exit_code, 3);
    EXPECT_THAT(
        results[rank].output,
        AllOf(
            HasSubstr("ERROR peer lost: "),
            HasSubstr("rank " + std::to_string(rank) + "/3: "),
            HasSubstr("rank 1"),
            Not(HasSubstr("timed out"))));
  }
  EXPECT_THAT(
      results[0].output,
      AllOf(HasSubstr("[" + call + "]"), HasSubstr("rank 1, tag ")));
  EXPECT_THAT(results[2].output, HasSubstr("rank 0 gave this group up"));
}

TEST_P(BackendFaultTest, ARankThatDiesBeforeItSendsIsNamedByThoseWhoWait) {
  ProbeRun run(3, probe("message_dies", 1));
  run.start_all();
  const auto results = run.wait();
  EXPECT_EQ(results[1].exit_code, 128 + SIGKILL);
  expect_rank_1_to_be_named(results, "recv");
  EXPECT_THAT(results[0].output, HasSubstr("\"halo\""));
}

TEST_P(BackendFaultTest, ARankThatDiesWhileItReceivesIsNamedByTheSender) {
  ProbeRun run(3, probe("receiver_dies", 1));
  run.start_all();
  const auto results = run.wait();
  EXPECT_EQ(results[1].exit_code, 128 + SIGKILL);
  expect_rank_1_to_be_named(results, "send");
}

TEST_P(BackendFaultTest, ARankThatNeverSendsIsNamedAtTheTimeout) {
  ProbeRun run(2, probe("message_skips", 1));
  run.start_all();
  const auto results = run.wait(1); // rank 1 sleeps on
  EXPECT_EQ(results[0].exit_code, 3);
  EXPECT_THAT(
      results[0].output,
      AllOf(
          HasSubstr("ERROR timeout: [recv] rank 0/2: timed out after 8."),
          HasSubstr("rank 1 did not come"),
          HasSubstr("from rank 1, tag 3")));
}

INSTANTIATE_TEST_SUITE_P(
    Backends,
    BackendFaultTest,
    ::testing::Values("shm", "gloo"),
    [](const auto& test) { return test.param; });

TEST(FaultTest, UnderTheLauncherAKilledRankIsReportedAndAllEnd) {
  CommandOptions options{.environment = without_launcher()};
  options.environment["TESSERA_TIMEOUT"] = "600"; // longer than the test
  const auto result = run_command(
      {tessera_program(),
       "run",
       "-n",
       "4",
       bin_dir() + "/comm_probe",
       "die",
       "3"},
      options);
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("rank 3 failed first"),
          HasSubstr("SIGKILL"),
          Not(HasSubstr("timed out"))));
}

} // namespace
} // namespace tessera
