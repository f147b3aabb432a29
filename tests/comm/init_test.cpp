#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <cstdlib>

#include "comm/host.h"
#include "comm/rendezvous.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(InitTest, AloneIsAGroupOfOneThatSendsNothing) {
  const Group alone = init();
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(alone.rank(), 0);
  EXPECT_EQ(local_rank(), 0);
  EXPECT_EQ(alone.backend(), "none");
  auto tensor = torch::full({2}, 3.0f);
  alone.all_reduce(tensor, ReduceOp::Avg);
  alone.broadcast(tensor, 0);
  auto output = torch::empty({2});
  alone.all_gather_into(output, tensor);
  alone.reduce_scatter(tensor, output);
  alone.barrier();
  EXPECT_EQ(tensor[1].item<float>(), 3);
  EXPECT_EQ(alone.split(0)->size(), 1);
  shutdown();
}

TEST(InitTest, WorldIsThereBetweenInitAndShutdown) {
  EXPECT_FALSE(is_initialized());
  EXPECT_THAT(
      error_of([] { world(); }), HasSubstr("Call tessera::init() first"));
  init();
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(world().size(), 1);
  EXPECT_THAT(error_of([] { init(); }), HasSubstr("already initialized"));
  shutdown();
  EXPECT_FALSE(is_initialized());
}

TEST(InitTest, RejectsOptionsThatMakeNoSense) {
  EXPECT_THAT(
      error_of([] { init(InitOptions().backend("mpi")); }),
      HasSubstr("no backend \"mpi\"; choose auto, shm, gloo, nccl or fake"));
  EXPECT_THAT(
      error_of([] { init(InitOptions().rank(2).world_size(2)); }),
      HasSubstr("rank 2 of a world of 2"));
  EXPECT_THAT(
      error_of(
          [] { init(InitOptions().timeout(std::chrono::milliseconds(0))); }),
      HasSubstr("timeout must be longer than zero"));
  EXPECT_THAT(
      error_of([] { init(InitOptions().rank(0).world_size(2)); }),
      HasSubstr("Set MASTER_ADDR and MASTER_PORT"));
  EXPECT_THAT(
      error_of(
          [] { init(InitOptions().rank(0).world_size(2).master_port(29500)); }),
      HasSubstr("MASTER_PORT is set but MASTER_ADDR is not"));
}

TEST(InitTest, RejectsVariablesThatMakeNoSense) {
  setenv("TESSERA_TIMEOUT", "soon", 1);
  EXPECT_THAT(error_of([] { init(); }), HasSubstr("TESSERA_TIMEOUT=\"soon\""));
  unsetenv("TESSERA_TIMEOUT");
  setenv("TESSERA_CHECK", "yes", 1);
  EXPECT_THAT(error_of([] { init(); }), HasSubstr("TESSERA_CHECK=\"yes\""));
  unsetenv("TESSERA_CHECK");
  EXPECT_FALSE(is_initialized());
}

TEST(InitTest, WorldsCanBeMadeAgain) {
  for (int round = 0; round < 3; ++round) {
    on_ranks(2, [&](const Group& world) {
      auto tensor = torch::ones({1});
      world.all_reduce(tensor);
      EXPECT_EQ(tensor.item<float>(), 2);
    });
  }
}

TEST(InitTest, GroupsOutliveShutdown) {
  on_ranks(2, [](const Group& world) {
    const Group kept = world;
    shutdown();
    auto tensor = torch::ones({1});
    kept.all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

TEST(InitTest, AMissingHostIsNamed) {
  EXPECT_THAT(
      error_of([] {
        init(InitOptions()
                 .rank(1)
                 .world_size(2)
                 .master_addr("127.0.0.1")
                 .master_port(1)
                 .timeout(std::chrono::milliseconds(500)));
      }),
      HasSubstr("no store answered on 127.0.0.1:1 within 0.5 s"));
}

TEST(HostTest, WhatSeparatesRanksOfOneHostIsNamed) {
  using comm::what_separates;
  const std::string here = "boot/net:[1]/pid:[2]/user:[3]/0";
  EXPECT_EQ(what_separates(here, here), "");
  EXPECT_EQ(
      what_separates(here, "boot/net:[1]/pid:[2]/user:[4]/0"),
      "user namespaces");
  EXPECT_EQ(
      what_separates(here, "boot/net:[1]/pid:[5]/user:[4]/7"),
      "process namespaces and user namespaces and users");
  // Nobody expects hosts to share memory.
  EXPECT_EQ(what_separates(here, "boot/net:[9]/pid:[2]/user:[4]/0"), "");
  EXPECT_EQ(what_separates(here, "other/net:[1]/pid:[2]/user:[3]/0"), "");
  EXPECT_EQ(what_separates(comm::host_identity(), comm::host_identity()), "");
}

TEST(RendezvousTest, MembersSurviveTheirEncoding) {
  const comm::Member member{"boot/net:[1]/pid:[2]/0", 8, 2, 213, "backend=shm"};
  const comm::Member copy = comm::Member::decode(member.encode());
  EXPECT_EQ(copy.host, member.host);
  EXPECT_EQ(copy.world_size, 8);
  EXPECT_EQ(copy.cuda_devices, 2);
  EXPECT_EQ(copy.torch_version, 213);
  EXPECT_EQ(copy.settings, "backend=shm");
}

} // namespace
} // namespace tessera
