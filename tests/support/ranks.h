// Tests that run on several ranks at once.
#pragma once

#include <tessera/comm/group.h>

#include <chrono>
#include <functional>
#include <string>

namespace tessera::testing {

/// [Note: tests on ranks]
///
/// A test binary whose main() is run_tests() plays two parts. The process that
/// was started is the controller: it runs the tests as usual. The first
/// on_ranks() of the binary starts a pool of workers, processes of the same
/// binary, one per rank, which live until the end. When a test calls
/// on_ranks(), the controller tells the workers its name; each runs the *whole*
/// test body, and on_ranks() there calls its argument with a fresh world. The
/// controller reports the failures of a worker's assertions, with the rank in
/// front, so that a failure on any rank fails the test.
///
/// So a body outside on_ranks() runs in the controller and in every worker:
/// keep it free of side effects. Later on_ranks() of one test do nothing in
/// the controller, since the workers have finished the whole test by then.
///
/// A worker that does not finish in time is asked where it stands (operation,
/// group, stack), then killed. After a failure the pool is started anew, since
/// a group that failed is dead. A test that leaves a child process behind
/// fails.
struct RanksOptions {
  int size = 2;
  std::string backend = "auto";
  /// For collectives and set-up of the world.
  std::chrono::milliseconds timeout{20000};
  /// For the whole test.
  std::chrono::milliseconds test_timeout{60000};
};

/// Runs `body` on ranks 0 to size-1 with a world of its own, seeded alike.
void on_ranks(
    const RanksOptions& options,
    const std::function<void(const Group& world)>& body);
void on_ranks(int size, const std::function<void(const Group& world)>& body);

/// True in a worker of the pool.
bool in_worker();

/// main() of a test binary.
int run_tests(int argc, char** argv);

} // namespace tessera::testing
