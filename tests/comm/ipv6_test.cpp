// Whole runs over IPv6.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

int free_port() {
  const UniqueFd fd(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(fd.get(), generic, length), 0);
  EXPECT_EQ(getsockname(fd.get(), generic, &length), 0);
  return ntohs(address.sin6_port);
}

/// Both ends of `run`, each with its number.
void expect_both_to_sum(
    const std::vector<std::vector<std::string>>& words,
    const std::vector<CommandOptions>& options) {
  std::vector<std::unique_ptr<Command>> commands;
  for (size_t i = 0; i < words.size(); ++i) {
    commands.push_back(std::make_unique<Command>(words[i], options[i]));
  }
  for (auto& command : commands) {
    const auto result = command->wait();
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("sum=3 world=2 backend=gloo"));
  }
}

TEST(Ipv6Test, TwoLaunchersMeetAndTheirRanksTalk) {
  const std::string endpoint = "[::1]:" + std::to_string(free_port());
  std::vector<std::vector<std::string>> words;
  std::vector<CommandOptions> options;
  for (const int node : {0, 1}) {
    words.push_back(run_on_node_of_two(node, endpoint));
    words.back().push_back(bin_dir() + "/comm_probe");
    options.push_back({.environment = without_launcher()});
    options.back().environment["TESSERA_BACKEND"] = "gloo";
  }
  expect_both_to_sum(words, options);
}

TEST(Ipv6Test, TwoRanksMeetWithoutALauncher) {
  const std::string port = std::to_string(free_port());
  for (const char* address : {"::1", "[::1]"}) {
    std::vector<std::vector<std::string>> words;
    std::vector<CommandOptions> options;
    for (const char* rank : {"0", "1"}) {
      words.push_back({bin_dir() + "/comm_probe"});
      options.push_back({.environment = without_launcher()});
      auto& variables = options.back().environment;
      variables["RANK"] = rank;
      variables["WORLD_SIZE"] = "2";
      variables["MASTER_ADDR"] = address;
      variables["MASTER_PORT"] = port;
      variables["TESSERA_TIMEOUT"] = "50";
      variables["TESSERA_BACKEND"] = "gloo";
    }
    expect_both_to_sum(words, options);
  }
}

} // namespace
} // namespace tessera
