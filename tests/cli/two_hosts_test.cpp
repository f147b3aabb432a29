// Two hosts, played by two network namespaces joined by a veth pair.
#include <unistd.h>

#include <memory>

#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Made for one test and removed with everything in it.
class TwoHosts {
 public:
  TwoHosts() {
    const std::string id = std::to_string(getpid() % 100000);
    for (int host : {0, 1}) {
      names_[host] = "tessera" + id + "h" + std::to_string(host);
      links_[host] = "tsr" + id + "v" + std::to_string(host);
    }
    ok_ = ip({"netns", "add", names_[0]}) && ip({"netns", "add", names_[1]}) &&
        ip({"link",
            "add",
            links_[0],
            "netns",
            names_[0],
            "type",
            "veth",
            "peer",
            "name",
            links_[1],
            "netns",
            names_[1]}) &&
        bring_up(0) && bring_up(1);
  }

  ~TwoHosts() {
    for (const std::string& name : names_) {
      ip({"netns", "del", name});
    }
  }

  bool ok() const {
    return ok_;
  }
  const std::string& error() const {
    return error_;
  }
  static std::string address(int host) {
    return "10.217.84." + std::to_string(host + 1);
  }

  std::unique_ptr<Command> start(
      int host,
      std::vector<std::string> arguments,
      const std::vector<std::string>& program) const {
    std::vector<std::string> words{
        "ip",
        "netns",
        "exec",
        names_[host],
        tessera_program(),
        "run",
        "--nnodes",
        "2",
        "--node-rank",
        std::to_string(host),
        "--rdzv-endpoint",
        address(0) + ":29411",
        "--join-timeout",
        "20"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    words.insert(words.end(), program.begin(), program.end());
    CommandOptions options{.environment = without_launcher()};
    options.environment["TESSERA_TIMEOUT"] = "60";
    return std::make_unique<Command>(words, options);
  }

 private:
  bool ip(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "ip");
    const auto result = run_command(arguments);
    if (result.exit_code != 0 && error_.empty()) {
      error_ = result.output;
    }
    return result.exit_code == 0;
  }

  bool bring_up(int host) {
    const std::string& name = names_[host];
    return ip({"-n",
               name,
               "addr",
               "add",
               address(host) + "/24",
               "dev",
               links_[host]}) &&
        ip({"-n", name, "link", "set", links_[host], "up"}) &&
        ip({"-n", name, "link", "set", "lo", "up"});
  }

  std::string names_[2];
  std::string links_[2];
  std::string error_;
  bool ok_ = false;
};

#define SKIP_WITHOUT(hosts)                                               \
  if (!(hosts).ok()) {                                                    \
    GTEST_SKIP() << "network namespaces cannot be made here (needs root " \
                    "and Debian's iproute2): "                            \
                 << (hosts).error();                                      \
  }

TEST(TwoHostsTest, GlooAcrossHostsAndSharedMemoryInside) {
  const TwoHosts hosts;
  SKIP_WITHOUT(hosts);
  const std::vector<std::string> probe{bin_dir() + "/comm_probe", "hosts"};
  auto first = hosts.start(0, {"-n", "2"}, probe);
  auto second = hosts.start(1, {"-n", "2"}, probe);
  const auto on_first = first->wait();
  const auto on_second = second->wait();
  EXPECT_EQ(on_first.exit_code, 0) << on_first.output;
  EXPECT_EQ(on_second.exit_code, 0) << on_second.output;
  // Sums of rank + 1 within each group: 1+2+3+4, 1+2, 1+2.
  const std::string line = "world gloo=10, inside shm=3, across gloo=3";
  EXPECT_THAT(
      on_first.output,
      AllOf(HasSubstr("[0] " + line), HasSubstr("[1] " + line)));
  EXPECT_THAT(
      on_second.output,
      AllOf(HasSubstr("[2] " + line), HasSubstr("[3] " + line)));
}

TEST(TwoHostsTest, AFailureOnOneHostEndsBoth) {
  const TwoHosts hosts;
  SKIP_WITHOUT(hosts);
  const std::vector<std::string> script{
      "/bin/sh", "-c", "test $RANK != 3 || { sleep 0.5; exit 9; }; sleep 600"};
  auto first = hosts.start(0, {"-n", "2"}, script);
  auto second = hosts.start(1, {"-n", "2"}, script);
  const auto on_first = first->wait();
  const auto on_second = second->wait();
  EXPECT_EQ(on_first.exit_code, 9) << on_first.output;
  EXPECT_EQ(on_second.exit_code, 9) << on_second.output;
  EXPECT_THAT(on_first.output, HasSubstr("rank 3"));
}

} // namespace
} // namespace tessera
