// A small program that tests start as the ranks of a run. It uses the installed
// library as a user would. Errors are printed as `ERROR kind: text`, with exit
// code 3. PROBE_WITHOUT takes something away before the program begins: "memfd"
// makes the kernel refuse memfd_create, "dump" lets no peer look into this
// process.
#include <tessera/tessera.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

using tessera::Group;

struct Arguments {
  std::string mode;
  int rank = -1; // the one that misbehaves
  std::string backend = "auto";
};

/// One line in one write, so that lines of several ranks do not mix.
void say(const std::string& text) {
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

/// As a container's seccomp profile may do.
void refuse_memfd() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{std::size(program), program};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
    throw std::runtime_error("this kernel has no seccomp filters");
  }
}

void take_away(const std::string& what) {
  if (what == "memfd") {
    refuse_memfd();
  } else if (what == "dump") {
    prctl(PR_SET_DUMPABLE, 0);
  } else {
    throw std::runtime_error("PROBE_WITHOUT=" + what);
  }
}

double sum_of(const Group& group) {
  auto tensor = at::full({100'000}, group.rank() + 1.0);
  group.all_reduce(tensor);
  const double sum = tensor[0].item<double>();
  if ((tensor != sum).any().item<bool>()) {
    throw std::runtime_error("elements of one sum differ");
  }
  return sum;
}

void all_reduce(const Group& world, const Arguments&) {
  say("sum=" + std::to_string(static_cast<int>(sum_of(world))) +
      " world=" + std::to_string(world.size()) + " backend=" + world.backend());
}

/// A child that a rank forks ends; the rank itself continues.
void forks(const Group& world, const Arguments& arguments) {
  const pid_t child = fork();
  if (child == 0) {
    std::exit(0);
  }
  waitpid(child, nullptr, 0);
  all_reduce(world, arguments);
}

/// A child that a rank forks leaves main as the rank does: its copies of the
/// groups are destroyed, and it shuts down. The rank itself continues.
void fork_returns(const Group& world, const Arguments& arguments) {
  const auto part = world.split(0, world.rank());
  const pid_t child = fork();
  if (child == 0) {
    tessera::shutdown();
    return;
  }
  int status = -1;
  waitpid(child, &status, 0);
  if (status != 0) {
    throw std::runtime_error("the child ended badly");
  }
  sum_of(*part);
  all_reduce(world, arguments);
}

/// Shuts down and meets again, many times.
void again(const Group&, const Arguments& arguments) {
  for (int round = 0; round < 20; ++round) {
    tessera::shutdown();
    const auto world =
        tessera::init(tessera::InitOptions().backend(arguments.backend));
    sum_of(world);
  }
  all_reduce(tessera::world(), arguments);
}

/// Groups inside a host and across hosts.
void hosts(const Group& world, const Arguments&) {
  const int per_host = std::atoi(std::getenv("LOCAL_WORLD_SIZE"));
  const auto inside = world.split(world.rank() / per_host, world.rank());
  const auto across = world.split(world.rank() % per_host, world.rank());
  say("world " + world.backend() + "=" +
      std::to_string(static_cast<int>(sum_of(world))) + ", inside " +
      inside->backend() + "=" +
      std::to_string(static_cast<int>(sum_of(*inside))) + ", across " +
      across->backend() + "=" +
      std::to_string(static_cast<int>(sum_of(*across))));
}

/// Milliseconds on a clock that all processes of a host share.
std::string now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::to_string(
      std::chrono::duration_cast<std::chrono::milliseconds>(time).count());
}

/// The rank dies in the middle of a row of all-gathers.
void die(const Group& world, const Arguments& arguments) {
  auto input = at::full({1 << 20}, 1.0 * world.rank());
  auto output = at::empty({world.size(), 1 << 20});
  if (world.rank() == arguments.rank) {
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      say("dies at " + now());
      kill(getpid(), SIGKILL);
    }).detach();
  }
  try {
    while (true) {
      world.all_gather_into(output, input, "layers.0");
    }
  } catch (const std::exception&) {
    say("noticed at " + now());
    throw;
  }
}

void shapes(const Group& world, const Arguments& arguments) {
  const int64_t count = world.rank() == arguments.rank ? 5 : 4;
  world.all_reduce(at::full({count}, 1.0), tessera::ReduceOp::Sum, "layers.3");
}

void operators(const Group& world, const Arguments& arguments) {
  auto tensor = at::full({4}, 1.0);
  if (world.rank() == arguments.rank) {
    world.all_reduce(tensor);
  } else {
    world.broadcast(tensor, 0);
  }
}

void throws(const Group& world, const Arguments& arguments) {
  world.barrier();
  if (world.rank() == arguments.rank) {
    throw std::runtime_error("out of luck");
  }
  sum_of(world);
}

/// The rank is alive but never makes the call.
void skips(const Group& world, const Arguments& arguments) {
  world.barrier();
  if (world.rank() == arguments.rank) {
    std::this_thread::sleep_for(std::chrono::minutes(10));
  }
  sum_of(world);
}

/// The rank dies, or never comes, while rank 0 waits for a message from it and
/// the others for one from rank 0.
void wait_for_message(const Group& world, const Arguments&) {
  auto tensor = at::full({8}, 1.0);
  world.recv(tensor, world.rank() == 0 ? 1 : 0, 3, "halo");
}

void message_dies(const Group& world, const Arguments& arguments) {
  world.barrier();
  if (world.rank() == arguments.rank) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(getpid(), SIGKILL);
  }
  wait_for_message(world, arguments);
}

void message_skips(const Group& world, const Arguments& arguments) {
  world.barrier();
  if (world.rank() == arguments.rank) {
    std::this_thread::sleep_for(std::chrono::minutes(10));
  }
  wait_for_message(world, arguments);
}

/// The rank dies while rank 0 sends it more than any buffer on the way holds.
void receiver_dies(const Group& world, const Arguments& arguments) {
  world.barrier();
  auto tensor = at::full({1 << 22}, 1.0);
  if (world.rank() == arguments.rank) {
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      kill(getpid(), SIGKILL);
    }).detach();
    while (true) {
      world.recv(tensor, 0);
    }
  }
  while (world.rank() == 0) {
    world.send(tensor, arguments.rank);
  }
  wait_for_message(world, arguments);
}

int fail(const char* kind, const std::exception& error) {
  say(std::string("ERROR ") + kind + ": " + error.what());
  // As a program that does not unwind: groups are not destroyed.
  std::_Exit(3);
}

} // namespace

int main(int argc, char** argv) {
  const std::
      map<std::string, std::function<void(const Group&, const Arguments&)>>
          modes{
              {"all_reduce", all_reduce},
              {"again", again},
              {"forks", forks},
              {"fork_returns", fork_returns},
              {"hosts", hosts},
              {"die", die},
              {"shapes", shapes},
              {"operators", operators},
              {"throws", throws},
              {"skips", skips},
              {"message_dies", message_dies},
              {"message_skips", message_skips},
              {"receiver_dies", receiver_dies}};
  Arguments arguments;
  arguments.mode = argc > 1 ? argv[1] : "all_reduce";
  arguments.rank = argc > 2 ? std::atoi(argv[2]) : -1;
  arguments.backend = argc > 3 ? argv[3] : "auto";
  try {
    if (const char* what = std::getenv("PROBE_WITHOUT")) {
      take_away(what);
    }
    const auto world =
        tessera::init(tessera::InitOptions().backend(arguments.backend));
    modes.at(arguments.mode)(world, arguments);
  } catch (const tessera::TimeoutError& error) {
    return fail("timeout", error);
  } catch (const tessera::PeerLostError& error) {
    return fail("peer lost", error);
  } catch (const tessera::DisagreementError& error) {
    return fail("disagreement", error);
  } catch (const std::exception& error) {
    return fail("other", error);
  }
  return 0;
}
