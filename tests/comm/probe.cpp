// A small program that tests start as the ranks of a run. It uses the installed
// library as a user would. What goes wrong is printed as `ERROR kind: text`,
// with exit code 3.
#include <tessera/tessera.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
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

/// A child that a rank forks ends; the rank itself goes on.
void forks(const Group& world, const Arguments& arguments) {
  const pid_t child = fork();
  if (child == 0) {
    std::exit(0);
  }
  waitpid(child, nullptr, 0);
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

/// The rank dies in the middle of a row of all-gathers.
void die(const Group& world, const Arguments& arguments) {
  auto input = at::full({1 << 20}, 1.0 * world.rank());
  auto output = at::empty({world.size(), 1 << 20});
  if (world.rank() == arguments.rank) {
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      kill(getpid(), SIGKILL);
    }).detach();
  }
  while (true) {
    world.all_gather_into(output, input, "layers.0");
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

/// The rank is alive but never comes.
void skips(const Group& world, const Arguments& arguments) {
  world.barrier();
  if (world.rank() == arguments.rank) {
    std::this_thread::sleep_for(std::chrono::minutes(10));
  }
  sum_of(world);
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
              {"hosts", hosts},
              {"die", die},
              {"shapes", shapes},
              {"operators", operators},
              {"throws", throws},
              {"skips", skips}};
  Arguments arguments;
  arguments.mode = argc > 1 ? argv[1] : "all_reduce";
  arguments.rank = argc > 2 ? std::atoi(argv[2]) : -1;
  arguments.backend = argc > 3 ? argv[3] : "auto";
  try {
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
