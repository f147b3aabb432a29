// Ranks of one host that the kernel keeps apart: they use Gloo and say why, or
// all fail if shared memory was asked for.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "comm/store/store.h"
#include "comm/store/wire.h"
#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;

const char* const kGlooSum = "sum=3 world=2 backend=gloo";
const char* const kWarning = "All ranks use it now";

/// Two ranks of the probe, each started through `wrapper`, with a store of this
/// process: the one at `endpoint`, or one of their own. No launcher ends one
/// because the other failed.
class TwoRanks {
 public:
  explicit TwoRanks(
      const Words& wrapper,
      const Variables& variables = {},
      const std::string& backend = "auto",
      const comm::StoreEndpoint* endpoint = nullptr) {
    if (endpoint == nullptr) {
      store_ = comm::host_store(endpoint_, std::chrono::seconds(60));
    } else {
      endpoint_ = *endpoint;
    }
    Words words = wrapper;
    words.insert(
        words.end(), {bin_dir() + "/comm_probe", "all_reduce", "-1", backend});
    for (const char* rank : {"0", "1"}) {
      CommandOptions options;
      options.environment = {
          {"RANK", rank},
          {"WORLD_SIZE", "2"},
          {"MASTER_ADDR", endpoint_.address},
          {"MASTER_PORT", std::to_string(endpoint_.port)},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"TESSERA_TIMEOUT", "50"},
          {"OMP_NUM_THREADS", "1"}};
      for (const auto& [name, value] : variables) {
        options.environment[name] = value;
      }
      ranks_.push_back(std::make_unique<Command>(words, options));
    }
    for (auto& rank : ranks_) {
      const CommandResult result = rank->wait();
      exit_codes_.push_back(result.exit_code);
      output_ += result.output;
    }
  }

  const std::vector<int>& exit_codes() const {
    return exit_codes_;
  }
  /// The output of rank 0, then that of rank 1.
  const std::string& output() const {
    return output_;
  }

 private:
  comm::StoreEndpoint endpoint_{"127.0.0.1", 0};
  comm::StorePtr store_;
  std::vector<std::unique_ptr<Command>> ranks_;
  std::vector<int> exit_codes_;
  std::string output_;
};

MATCHER_P2(Says, times, text, "") {
  return num_times(arg, text) == times;
}

void expect_gloo_with_one_warning(const TwoRanks& ranks) {
  EXPECT_THAT(ranks.exit_codes(), ElementsAre(0, 0)) << ranks.output();
  EXPECT_THAT(ranks.output(), AllOf(Says(2, kGlooSum), Says(1, kWarning)));
}

/// Why a command cannot be used for a test here; empty if it can.
std::string problem_of(Words words) {
  words.push_back("true");
  const auto result = run_command(words);
  return result.exit_code == 0 ? "" : words[0] + ": " + result.output;
}

/// Sends, as a client, the message that ends a run. True once the store has
/// accepted the message or hung up.
bool forge_verdict(int port) {
  using comm::wire::Message;
  using comm::wire::Query;
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const std::string words =
      Message(Query::kValidate).number(comm::wire::kMagic).bytes() +
      Message(Query::kSet)
          .key("tessera/attempt0/init0/verdict")
          .text("forged")
          .bytes() +
      Message(Query::kPing).number<uint32_t>(7).bytes();
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
    return false;
  }
  send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL);
  char answer[4];
  recv(fd.get(), answer, sizeof answer, MSG_WAITALL);
  return true;
}

#define SKIP_IF(problem)                                                     \
  if (const std::string text = (problem); !text.empty()) {                   \
    GTEST_SKIP() << "namespaces cannot be made here (needs root): " << text; \
  }

TEST(ApartTest, UserNamespacesOfTheirOwn) {
  const Words own{"unshare", "--user", "--map-root-user"};
  SKIP_IF(problem_of(own));
  const TwoRanks ranks(own);
  EXPECT_THAT(ranks.exit_codes(), ElementsAre(0, 0)) << ranks.output();
  EXPECT_THAT(ranks.output(), Says(2, kGlooSum));
  EXPECT_THAT(
      ranks.output(), Says(1, "on one host but in different user namespaces"));
  const TwoRanks insisting(own, {}, "shm");
  EXPECT_THAT(insisting.exit_codes(), ElementsAre(3, 3));
  EXPECT_THAT(insisting.output(), Says(2, "the backend \"shm\" was asked for"));
  const TwoRanks meaning_it(own, {{"TESSERA_BACKEND", "gloo"}});
  EXPECT_THAT(meaning_it.exit_codes(), ElementsAre(0, 0));
  EXPECT_THAT(meaning_it.output(), Not(HasSubstr("different user")));
}

TEST(ApartTest, MemfdIsRefused) {
  const TwoRanks ranks({}, {{"PROBE_WITHOUT", "memfd"}});
  expect_gloo_with_one_warning(ranks);
  EXPECT_THAT(
      ranks.output(),
      HasSubstr("rank 0 cannot share memory with its peers: memfd_create: "
                "Operation not permitted"));
}

TEST(ApartTest, WhereSharedMemoryWasAskedForItIsAnErrorOnEveryRank) {
  const Variables hindered{{"PROBE_WITHOUT", "memfd"}};
  const Variables asking{
      {"PROBE_WITHOUT", "memfd"}, {"TESSERA_BACKEND", "shm"}};
  for (const TwoRanks& ranks :
       {TwoRanks({}, hindered, "shm"), TwoRanks({}, asking)}) {
    EXPECT_THAT(ranks.exit_codes(), ElementsAre(3, 3));
    EXPECT_THAT(
        ranks.output(),
        AllOf(
            Says(2, "rank 0 cannot share memory with its peers"),
            Not(HasSubstr(kWarning))));
  }
}

/// A value that makes no sense is not a reason to use Gloo.
TEST(ApartTest, AWrongSettingStaysAnError) {
  const TwoRanks ranks({}, {{"TESSERA_SHM_SLOT_BYTES", "many"}});
  EXPECT_THAT(ranks.exit_codes(), ElementsAre(3, 3));
  EXPECT_THAT(ranks.output(), Says(2, "TESSERA_SHM_SLOT_BYTES=\"many\""));
}

/// Such as programs that may not be read, or that gave up privileges.
TEST(ApartTest, ProgramsThatLetNobodyLookIn) {
  // Root may look anywhere unless this is taken from it.
  const Words weaker{"setpriv", "--bounding-set=-sys_ptrace"};
  SKIP_IF(problem_of(weaker));
  const TwoRanks ranks(weaker, {{"PROBE_WITHOUT", "dump"}});
  expect_gloo_with_one_warning(ranks);
  EXPECT_THAT(
      ranks.output(),
      AllOf(
          HasSubstr("rank 1 cannot share memory with its peers"),
          HasSubstr("Permission denied")));
}

/// A process namespace that still has its parent's /proc.
TEST(ApartTest, AProcOfOtherProcesses) {
  const Words stale{"unshare", "--pid", "--fork", "--kill-child"};
  SKIP_IF(problem_of(stale));
  Words words = stale;
  words.insert(
      words.end(),
      {tessera_program(), "run", "-n", "2", bin_dir() + "/comm_probe"});
  const auto result =
      run_command(words, CommandOptions{.environment = without_launcher()});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(Says(2, kGlooSum), Says(1, kWarning)));
}

/// Another user of the host writes into the store, early enough to be first.
TEST(ApartTest, ANeighbourCannotSteerARunOfRoot) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "another user cannot be played here (needs root)";
  }
  comm::StoreEndpoint endpoint{"127.0.0.1", 0};
  const auto store = comm::host_store(endpoint, std::chrono::seconds(60));
  const pid_t neighbour = fork();
  if (neighbour == 0) {
    _exit(setuid(65533) == 0 && forge_verdict(endpoint.port) ? 0 : 1);
  }
  int status = -1;
  waitpid(neighbour, &status, 0);
  EXPECT_EQ(status, 0);
  const TwoRanks ranks({}, {}, "auto", &endpoint);
  EXPECT_THAT(ranks.exit_codes(), ElementsAre(0, 0)) << ranks.output();
  EXPECT_THAT(ranks.output(), Says(2, "sum=3 world=2 backend=shm"));
}

TEST(ApartTest, TheVariableChoosesTheBackend) {
  EXPECT_THAT(
      TwoRanks({}, {{"TESSERA_BACKEND", "gloo"}}).output(), Says(2, kGlooSum));
  // The program's own choice comes first.
  EXPECT_THAT(
      TwoRanks({}, {{"TESSERA_BACKEND", "gloo"}}, "shm").output(),
      Says(2, "sum=3 world=2 backend=shm"));
  for (const std::string value : {"mpi", "fake"}) {
    const TwoRanks ranks({}, {{"TESSERA_BACKEND", value}});
    EXPECT_THAT(ranks.exit_codes(), ElementsAre(3, 3));
    EXPECT_THAT(
        ranks.output(), HasSubstr("TESSERA_BACKEND=\"" + value + "\" is not"));
  }
}

} // namespace
} // namespace tessera
